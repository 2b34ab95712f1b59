"""Arbitration: turn the recommendations of all services into allocations within the GPU budget.

Order: realtime before standard before batch, then the largest breach of an objective, then the wake that
waits longest; minimums before growth. The first start of a service that may sleep is the last of the
minimums: others wait with requests. Every new replica, including those from spec.replicas or minReplicas,
must fit in the budget (common/budget.py).

A replica that its load needs is not removed for another service. Others are, in this order:

1. A replica that only waits for the next surge. `arbitrate` asks its service, which then removes it if all its
   other checks for a scale-down pass.
2. For a service that wakes: all replicas of services that may sleep and are idle, those whose sleep costs least
   first (`early_sleep_cost`). They are asked to go to sleep early, in the two steps of any sleep.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType

from fleetkeeper.autoscale.constants import HANDOVER_S, WAKE_LACKS_S
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.rules.idle import EarlySleep
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, Decision
from fleetkeeper.common.budget import Budget, Holding, ServiceKey, Usage, bounded_replicas
from fleetkeeper.common.nodes import ANY_NODE, NodeNeeds
from fleetkeeper_contract.tiers import Tier

NO_HOLDINGS: Mapping[ServiceKey, Holding] = MappingProxyType({})


class Lack(IntEnum):
    """Whether a service lacks replicas because of a budget."""

    NOTHING = 0
    LONG = 1
    """For longer than another service's replica would need to make room, or it wakes."""
    CONFIRMED = 2
    """That long, and its pods were read directly; or it wakes for longer than `WAKE_LACKS_S`."""


@dataclass(frozen=True, slots=True)
class Want:
    """The recommendation of one service."""

    namespace: str
    name: str
    replicas: int
    supplied: int
    """Replicas that run or are starting."""
    min_replicas: int = 1
    gpus_per_replica: int = 1
    tier: Tier = Tier.STANDARD
    """The most urgent tier with traffic."""
    breach: float = 0.0
    """The worst signal divided by its objective (1: at the objective)."""
    lacks: Lack = Lack.NOTHING
    kept: int = 0
    """Replicas that could be removed, if they were not kept for the next surge."""
    has_released: bool = False
    """True if such a replica was removed for another service, which may not have its accelerators yet."""
    is_first_start: bool = False
    """True for a service that may sleep and has no replica yet, although it neither sleeps nor wakes."""
    waits_since: float = math.inf
    """Time since when it wakes; infinite if it does not."""
    early_sleep: EarlySleep | None = None
    """What its sleep would cost; None if it may not sleep now."""
    node_needs: NodeNeeds = ANY_NODE
    """What its replicas need of a node."""
    goes_to_sleep: bool = False
    """True if its accelerators are about to become free."""

    @property
    def key(self) -> ServiceKey:
        """The namespace and name."""
        return self.namespace, self.name

    @property
    def wakes(self) -> bool:
        """Whether it wakes from its sleep."""
        return self.waits_since < math.inf

    @property
    def gpus(self) -> int:
        """The accelerators of its replicas that run or are starting."""
        return self.supplied * self.gpus_per_replica

    @property
    def gpus_to_leave(self) -> int:
        """Those that it does not want any more."""
        left = 0 if self.goes_to_sleep else min(self.replicas, self.supplied)
        return self.gpus - left * self.gpus_per_replica


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of one service."""

    replicas: int
    limited_by: str = ""
    """The budget that reduced the replicas; empty without a reduction."""
    confirms: bool = False
    """True if a replica may be removed elsewhere, or this service may sleep early, once its pods are read directly."""
    releases: bool = False
    """True if this service should remove a replica that it keeps for the next surge."""
    sleeps_for: str = ""
    """The service that wakes and needs the accelerators of this idle one; empty if none does."""


def lacking_since(
    before: float | None,
    inputs: ControlInputs,
    allocation: Allocation,
    now: float,
    *,
    recommended: int,
    needed: int,
) -> float | None:
    """Return since when a budget has allowed fewer replicas than recommended; None if it does not."""
    if allocation.limited_by and recommended > inputs.replicas:
        return now if before is None else before
    # While limits are raised, a tick may order nothing although more replicas are needed.
    return before if max(recommended, needed) > inputs.replicas else None


def want_of(
    inputs: ControlInputs,
    signals: Signals,
    replicas: Decision[int],
    memory: ReplicasMemory,
    now: float,
    *,
    lacks_since: float | None,
    kept: int,
    cold_start_s: float,
    early_sleep: EarlySleep | None = None,
) -> Want:
    """Return the recommendation of one service.

    Replicas that the planner would not create must not take accelerators from other services. Those that
    only a deadline requires are as urgent as tier batch. A replica of another service takes a drain and a cold
    start to make room. The wake mark of a service that wakes proves its need, and its status says since when.
    """
    settings, handover_s = inputs.settings, HANDOVER_S + cold_start_s
    is_first_start = _is_first_start(inputs)
    lacks = Lack.NOTHING
    if settings.waking_since is not None:
        if not settings.wake_has_failed:
            is_long = now - settings.waking_since >= WAKE_LACKS_S
            lacks = Lack.CONFIRMED if is_long else Lack.LONG
    elif lacks_since is not None and not is_first_start and now - lacks_since >= handover_s:
        lacks = Lack.LONG if memory.direct_since is None else Lack.CONFIRMED
    is_pin_due = (
        not settings.activation.is_scaled and not settings.paused and not inputs.scale_up_blocked
    )
    return Want(
        namespace=inputs.namespace,
        name=inputs.name,
        replicas=replicas.value if settings.tunes_replicas or is_pin_due else inputs.replicas,
        supplied=inputs.replicas,
        min_replicas=settings.min_replicas,
        gpus_per_replica=inputs.gpus_per_replica,
        tier=_tier_of(inputs, signals, replicas),
        breach=max(
            signals.queue_wait_s / settings.queue_wait_objective_s,
            signals.batch_time_s / settings.batch_time_objective_s,
        ),
        lacks=lacks,
        kept=kept if settings.tunes_replicas else 0,
        has_released=now - memory.released < handover_s,
        is_first_start=is_first_start,
        waits_since=math.inf if settings.waking_since is None else settings.waking_since,
        early_sleep=early_sleep,
        node_needs=inputs.node_needs,
        goes_to_sleep=settings.goes_to_sleep,
    )


def _is_first_start(inputs: ControlInputs) -> bool:
    settings = inputs.settings
    is_awake = settings.activation.is_scaled and settings.waking_tier is None
    return settings.sleep_after_s is not None and is_awake and inputs.replicas == 0


def _tier_of(inputs: ControlInputs, signals: Signals, replicas: Decision[int]) -> Tier:
    if inputs.settings.waking_tier is not None:
        return inputs.settings.waking_tier
    return Tier.BATCH if replicas.reason == BATCH_DEADLINE else _urgent_tier(signals)


def _urgent_tier(signals: Signals) -> Tier:
    rates, gauges = signals.rates, signals.gauges
    if rates.arrivals_realtime + gauges.waiting_realtime > 0:
        return Tier.REALTIME
    only_batch = rates.arrivals_batch > 0 and rates.arrivals_standard + gauges.waiting_standard == 0
    return Tier.BATCH if only_batch else Tier.STANDARD


def arbitrate(
    wants: Iterable[Want], budget: Budget, holdings: Mapping[ServiceKey, Holding] = NO_HOLDINGS
) -> dict[ServiceKey, Allocation]:
    """Return the allocations by (namespace, name). The result does not depend on the order of `wants`.

    `holdings`: the accelerators of all services, including those without a recommendation. A service
    that is being deleted, cannot be read or could not be decided keeps its share.

    Example: 4 accelerators and two services with one replica each; 3 are recommended for realtime and 4
    for batch: realtime gets 3, batch keeps 1 and its allocation names the budget.
    """
    asked = sorted(wants, key=lambda want: want.key)
    supplied = {want.key: Holding(want.supplied * want.gpus_per_replica) for want in asked}
    usage = Usage(budget, {**supplied, **holdings})
    granted = {want.key: Allocation(min(want.replicas, want.supplied)) for want in asked}
    growing = sorted((w for w in asked if w.replicas > granted[w.key].replicas), key=_urgency)
    for want in growing:
        _grant(want, min(want.min_replicas, want.replicas), granted, usage)
    for want in growing:
        _grant(want, want.replicas, granted, usage)
    _ask(asked, [want for want in growing if granted[want.key].limited_by], granted, usage)
    return granted


def _ask(
    wants: Sequence[Want],
    limited: Iterable[Want],
    granted: dict[ServiceKey, Allocation],
    usage: Usage,
) -> None:
    """Ask others to make room for the most urgent service that lacks a replica for long; wakes come first.

    Not while as many accelerators of the same budget are about to become free for it, and not if those asked
    would make no room for one of its replicas.
    """
    promised: list[tuple[str, int]] = []
    for want in sorted(limited, key=lambda want: not want.wakes):
        if want.lacks is Lack.NOTHING:
            continue
        scope = usage.limiting_namespace(want.key)
        near = [other for other in wants if scope in (None, other.namespace)]
        lacking = (want.replicas - granted[want.key].replicas) * want.gpus_per_replica
        held = granted[want.key].replicas * want.gpus_per_replica
        # Below 0 if more is in use than allowed, because the budget was lowered.
        free = (usage.allowance(want.key).gpus or 0) - held
        soon = free + usage.leaving(scope) + sum(other.gpus_to_leave for other in near)
        soon -= sum(gpus for of, gpus in promised if scope in (None, of))
        if soon >= lacking:
            promised.append((want.namespace, lacking))
            continue
        missing = want.gpus_per_replica - soon
        if _ask_for_kept(want, near, missing, granted) or _ask_to_sleep(
            want, near, missing, granted, usage
        ):
            return


def _ask_for_kept(
    want: Want, near: Iterable[Want], missing: int, granted: dict[ServiceKey, Allocation]
) -> bool:
    """Ask for a replica that is kept for a surge; return whether there is one that makes room."""
    able = [other for other in near if other.kept > 0]
    if not able or sum(other.kept * other.gpus_per_replica for other in able) < missing:
        return False
    granted[want.key] = replace(granted[want.key], confirms=True)
    if want.lacks is Lack.CONFIRMED:
        most = max(able, key=lambda other: (other.kept * other.gpus_per_replica, other.key))
        granted[most.key] = replace(granted[most.key], releases=True)
    return True


def _ask_to_sleep(
    want: Want,
    near: Iterable[Want],
    missing: int,
    granted: dict[ServiceKey, Allocation],
    usage: Usage,
) -> bool:
    """Ask idle services to sleep for one that wakes and has no replica; return whether any was asked.

    First the pods of all that might sleep for it are read directly.
    """
    if not want.wakes or granted[want.key].replicas > 0 or missing <= 0:
        return False
    would_hold = usage.used_in(want.namespace) + want.gpus_per_replica
    idle = {
        other: other.early_sleep
        for other in near
        if other.early_sleep is not None
        and other.early_sleep.yields_to(want.tier)
        and want.node_needs.are_met_by_nodes_of(other.node_needs)
        and (other.namespace == want.namespace or usage.used_in(other.namespace) > would_hold)
    }
    if not _fewest(idle, missing):
        return False
    for other in idle:
        granted[other.key] = replace(granted[other.key], confirms=True)
    if want.lacks is not Lack.CONFIRMED:
        return False
    asked = _fewest({other: early for other, early in idle.items() if early.is_read}, missing)
    for other in asked:
        by_name = f"{want.namespace}/{want.name}"
        granted[other.key] = replace(granted[other.key], sleeps_for=by_name)
    return bool(asked)


def _fewest(idle: Mapping[Want, EarlySleep], missing: int) -> list[Want]:
    """Return the fewest services with so many accelerators on one node, of equally many the cheapest.

    Empty if no node has enough. Those that were asked before come first: else two could sleep for one.
    """

    def order(chosen: Sequence[Want]) -> tuple[int, int, float, list[ServiceKey]]:
        asked = sum(idle[want].is_asked for want in chosen)
        cost = sum(idle[want].cost for want in chosen)
        return -asked, len(chosen), cost, [want.key for want in chosen]

    on_nodes: defaultdict[str, Counter[Want]] = defaultdict(Counter)
    for want, early in idle.items():
        for node in early.nodes:
            on_nodes[node][want] += want.gpus_per_replica
    found = (_fewest_on_node(gpus, idle, missing) for gpus in on_nodes.values())
    return min(filter(None, found), key=order, default=[])


def _fewest_on_node(
    gpus: Mapping[Want, int], idle: Mapping[Want, EarlySleep], missing: int
) -> list[Want]:
    """Return the fewest services of a node with so many accelerators there; empty if all have too few."""
    left = sorted(gpus, key=lambda want: (not idle[want].is_asked, idle[want].cost, want.key))
    chosen: list[Want] = []
    while missing > 0 and left:
        enough = [want for want in left if gpus[want] >= missing]
        one = enough[0] if enough else max(left, key=lambda want: gpus[want])
        chosen.append(one)
        left.remove(one)
        missing -= gpus[one]
    return chosen if missing <= 0 else []


def _urgency(want: Want) -> tuple[bool, bool, int, float, float, ServiceKey]:
    return (
        want.is_first_start,
        want.has_released,
        want.tier,
        -want.breach,
        want.waits_since,
        want.key,
    )


def _grant(want: Want, up_to: int, granted: dict[ServiceKey, Allocation], usage: Usage) -> None:
    kept = granted[want.key].replicas
    if up_to <= kept:
        return
    allowance = usage.allowance(want.key)
    replicas, by = bounded_replicas(up_to, kept, want.gpus_per_replica, allowance)
    usage.claim(want.key, replicas * want.gpus_per_replica)
    granted[want.key] = Allocation(replicas, by)
