"""Arbitration: turn the recommendations of all services into allocations within the GPU budget.

Order: realtime before standard before batch, then the largest breach of an objective, then the wake that
waits longest; minimums before growth. The first start of a service that may sleep is the last of the
minimums: others wait with requests. Every new replica, including those from spec.replicas or minReplicas,
must fit in the budget (common/budget.py).

A replica that its load needs is not removed for another service. One that only waits for the next surge is:
`arbitrate` asks its service, which then removes it if all its other checks for a scale-down pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType

from fleetkeeper.autoscale.constants import HANDOVER_S
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, Decision
from fleetkeeper.common.budget import Budget, Holding, ServiceKey, Usage, bounded_replicas
from fleetkeeper_contract.tiers import Tier

NO_HOLDINGS: Mapping[ServiceKey, Holding] = MappingProxyType({})


class Lack(IntEnum):
    """Whether a service lacks replicas because of a budget."""

    NOTHING = 0
    LONG = 1
    """For longer than another service's replica would need to make room."""
    CONFIRMED = 2
    """That long, and its pods were read directly."""


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

    @property
    def key(self) -> ServiceKey:
        """The namespace and name."""
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of one service."""

    replicas: int
    limited_by: str = ""
    """The budget that reduced the replicas; empty without a reduction."""
    confirms: bool = False
    """True if a replica may be removed elsewhere, once the pods of this service are read directly."""
    releases: bool = False
    """True if this service should remove a replica that it keeps for the next surge."""


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
) -> Want:
    """Return the recommendation of one service.

    Replicas that the planner would not create must not take accelerators from other services. Those that
    only a deadline requires are as urgent as tier batch. A replica of another service takes a drain and a cold
    start to make room.
    """
    settings, handover_s = inputs.settings, HANDOVER_S + cold_start_s
    is_first_start = _is_first_start(inputs)
    lacks = Lack.NOTHING
    if lacks_since is not None and not is_first_start and now - lacks_since >= handover_s:
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
    """Ask for a kept replica for the most urgent service that lacks one for long.

    Not while as many accelerators of the same budget are about to become free, and not if all kept replicas
    would make no room for one of this service.
    """
    for want in limited:
        if want.lacks is Lack.NOTHING:
            continue
        scope = usage.limiting_namespace(want.key)
        near = [other for other in wants if scope in (None, other.namespace)]
        able = [other for other in near if other.kept > 0]
        lacking = (want.replicas - granted[want.key].replicas) * want.gpus_per_replica
        freed = sum(
            max(0, other.supplied - other.replicas) * other.gpus_per_replica for other in near
        )
        soon = usage.leaving(scope) + freed
        if not able or soon >= lacking:
            continue
        held = granted[want.key].replicas * want.gpus_per_replica
        free = max(0, (usage.allowance(want.key).gpus or 0) - held)
        kept = sum(other.kept * other.gpus_per_replica for other in able)
        if free + soon + kept < want.gpus_per_replica:
            continue
        granted[want.key] = replace(granted[want.key], confirms=True)
        if want.lacks is Lack.CONFIRMED:
            most = max(able, key=lambda other: (other.kept * other.gpus_per_replica, other.key))
            granted[most.key] = replace(granted[most.key], releases=True)
        return


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
