"""Scale-down of replicas: complete and fresh samples, closed breakers, an empty queue, enough capacity.

It goes one step at a time, and not below what was needed lately or is kept for the next surge. Each
requirement has a reason, and the first that fails is the decision's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.constants import (
    ASKED_KEPT_S,
    CARRY_KV_RATIO,
    CARRY_RATIO,
    DIRECT_WHOLE_S,
    DOWN_EVERY_REPLICA_S,
    DOWN_SHARE,
    SURGE_DELAYS,
)
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.need import Need
from fleetkeeper.autoscale.rules.objectives import wait_is_near
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.autoscale.types import (
    ControlInputs,
    ControlSettings,
    Decision,
    Grade,
    decide,
    no_change,
)

RELEASED: Final = "ReserveReleased"
UNCHECKED: Final = "replicas must be read directly before one is removed"
"""Why a scale-down that rests on Prometheus alone has to wait."""


@dataclass(frozen=True, slots=True)
class Surge:
    """The replicas that were required when queue wait last missed its objective, and when that was."""

    replicas: int
    at: float


@dataclass(frozen=True, slots=True)
class ReplicasMemory:
    """The memory of the replica rules."""

    recommendations: tuple[tuple[float, int], ...] = ()
    """(slot start, highest recommendation) over the stabilization window (`scale_down_delay_s`)."""
    since: float | None = None
    """Start of the observation."""
    recent_replicas: tuple[tuple[float, int], ...] = ()
    """(time, live replicas) over the last 15 s, for the bound on steps up."""
    lowered: float = 0.0
    """Time of the last scale-down."""
    raised: float = 0.0
    """Time of the last scale-up."""
    direct_since: float | None = None
    """Time since which every pod was read directly, without a gap and with Prometheus not lost."""
    surge: Surge | None = None
    """The replicas at the last time that requests waited too long."""
    released: float = -math.inf
    """Time at which a replica that was kept for a surge was last removed for another service."""
    missed: float = -math.inf
    """Time of the last scale-up soon after that."""


# -- what forbids it ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gates:
    """What forbids the removal of a replica."""

    removal: str = ""
    """The first reason why none may be removed; empty if nothing forbids it."""
    breakers_closed: bool = True
    floor: int = 0
    """Number of replicas below which the control breaker allows no scale-down."""
    releases: bool = False
    """True if another service needs a replica that this one keeps for the next surge."""


def gates_of(state: TickState, need: Need, *, releases: bool) -> Gates:
    """Return what forbids the removal of a replica."""
    inputs, closed = state.inputs, state.breakers_closed
    floor = 0
    if inputs.settings.breakers_act and state.breakers.control.state is BreakerState.OPEN:
        floor = max(inputs.replicas, inputs.settings.fallback_replicas or 0)
    return Gates(
        next(objections(inputs, need, state.estimate.supply, breakers_closed=closed), ""),
        closed,
        floor,
        releases=releases,
    )


def objections(
    inputs: ControlInputs, need: Need, supply: Supply, *, breakers_closed: bool
) -> Iterator[str]:
    """Yield why no replica may be removed."""
    if why := unread(need.signals):
        yield why
    if not breakers_closed:
        yield "a circuit breaker is not closed"
    starting = supply.pending + supply.overdue or inputs.replicas - supply.ready
    if starting > 0:
        yield "1 pod is starting" if starting == 1 else f"{starting} pods are starting"
    if supply.hung:
        yield f"{supply.hung} engines are hung"
    if wait_is_near(need.signals, inputs.settings):
        yield f"queue wait is {need.signals.queue_wait_s:.2f} s, above a quarter of its objective"
    left = inputs.replicas - 1
    if left >= 1 and not need.signals.idle:
        yield from _overload(need, left)


def unread(signals: Signals) -> str:
    """Return which samples are missing or late; empty if every ready pod has fresh ones."""
    if signals.grade is not Grade.FRESH:
        return f"signals are {signals.grade.lower()}"
    if signals.coverage < 1.0:
        return f"only {signals.reporting_pods} of {signals.ready_pods} ready pods report"
    count = signals.overdue_pods
    return f"samples of {count} replicas are overdue" if count else ""


def _overload(need: Need, left: int) -> Iterator[str]:
    """Yield why so many replicas would not carry what runs."""
    if need.capacity <= 0:
        yield "the capacity of a replica is not known yet"
    if need.signals.gauges.running / left > CARRY_RATIO * need.capacity:
        yield f"{left} replicas would run above 85% of their capacity"
    if need.signals.kv_ratio * (left + 1) / left > CARRY_KV_RATIO:
        yield f"the KV cache of {left} replicas would be more than 80% full"


# -- direct reads ---------------------------------------------------------------------------------


def with_direct_reads(
    inputs: ControlInputs, signals: Signals, memory: ReplicasMemory, now: float
) -> ReplicasMemory:
    """Return the memory, noting whether every ready pod has fresh samples that were read directly."""
    if inputs.checks_directly:
        direct = signals.is_direct
    else:
        direct = signals.source is Source.DIRECT and not inputs.prometheus_lost
    before = memory.direct_since
    since = (now if before is None else before) if direct and not unread(signals) else None
    return memory if since == before else replace(memory, direct_since=since)


def _unproven(inputs: ControlInputs, signals: Signals, memory: ReplicasMemory, now: float) -> str:
    """Return why the source of the samples does not allow a scale-down, or an empty string.

    Direct reads allow none while Prometheus is lost, nor before they were complete for long enough.
    Prometheus alone allows none if the pods can be read directly: another workload could export series
    in their name.
    """
    direct_s = -1.0 if memory.direct_since is None else now - memory.direct_since
    if inputs.checks_directly:
        return "" if direct_s >= DIRECT_WHOLE_S else UNCHECKED
    if signals.source is not Source.DIRECT:
        return ""
    if inputs.prometheus_lost:
        return "Prometheus returns no fresh samples"
    needed_s = max(DIRECT_WHOLE_S, inputs.settings.scale_down_delay_s)
    if direct_s >= needed_s:
        return ""
    return f"every replica must be read directly for {needed_s:.0f} s without a gap first"


def reads_asked_at(
    asked_at: float | None,
    inputs: ControlInputs,
    replicas: Decision[int],
    load: LoadBreaker,
    now: float,
    *,
    confirms: bool,
) -> float | None:
    """Return when pods last had to be read directly, because replicas or admission may be reduced.

    None: not recently. A scale-down counts, also one that only the pace or a missing direct read delays.
    `confirms`: another service may lose a replica for this one, or this one may go to sleep.
    """
    if not inputs.checks_directly:
        return None
    lowers = replicas.reason in {"LoadFell", RELEASED, "ScaleDownRateLimited"}
    if lowers or replicas.detail == UNCHECKED or confirms or load != LoadBreaker():
        return now
    return asked_at if asked_at is not None and now - asked_at < ASKED_KEPT_S else None


# -- the reserve for the next surge ---------------------------------------------------------------


def with_surge(
    inputs: ControlInputs,
    need: Need,
    gates: Gates,
    memory: ReplicasMemory,
    now: float,
    *,
    raised: Decision[int] | None,
) -> ReplicasMemory:
    """Return the memory with the replicas that are kept for the next surge.

    `raised`: the scale-up of this tick, if any. It is kept if the long wait lasts, if requests are shed, or
    if it takes back a recent scale-down. One that only the deadline of a backlog required is no surge. A load
    that needs the kept replicas again keeps them for longer.
    """
    kept_s = SURGE_DELAYS * inputs.settings.scale_down_delay_s
    kept = surge_floor(inputs.settings, memory, now)
    needed = 0
    if raised is not None and raised.valid:
        if now - memory.released < kept_s:
            memory = replace(memory, missed=now)
        is_surge = need.wait_lasts or not gates.breakers_closed
        is_reversal = now - memory.lowered < kept_s
        if (is_surge and raised.reason != BATCH_DEADLINE) or is_reversal:
            needed = raised.value
    elif need.wait_lasts:
        needed = inputs.replicas
    if needed == 0 and not 0 < kept <= (need.needed or 0):
        return memory
    return replace(memory, surge=Surge(max(kept, needed), now))


def surge_floor(settings: ControlSettings, memory: ReplicasMemory, now: float) -> int:
    """Return the replicas that are kept for the next surge; 0 if there was none for SURGE_DELAYS delays."""
    surge = memory.surge
    if surge is None or now - surge.at >= SURGE_DELAYS * settings.scale_down_delay_s:
        return 0
    return surge.replicas


def kept_for_surge(inputs: ControlInputs, gates: Gates, memory: ReplicasMemory, now: float) -> int:
    """Return how many replicas could be removed, if they were not kept for the next surge.

    0 for a service that needed a released replica again, for SURGE_DELAYS delays.
    """
    settings = inputs.settings
    is_missed = now - memory.missed < SURGE_DELAYS * settings.scale_down_delay_s
    is_kept = surge_floor(settings, memory, now) >= inputs.replicas and not is_missed
    if not is_kept or not _is_observed(settings, memory, now) or gates.removal:
        return 0
    return max(0, inputs.replicas - _enough(inputs, memory))


# -- the step -------------------------------------------------------------------------------------


def bounded(count: int, settings: ControlSettings) -> int:
    """Return the count within minReplicas and maxReplicas."""
    return min(settings.max_replicas, max(settings.min_replicas, count))


def _enough(inputs: ControlInputs, memory: ReplicasMemory) -> int:
    """Return the highest recommendation of the stabilization window."""
    most = max((count for _, count in memory.recommendations), default=inputs.replicas)
    return bounded(most, inputs.settings)


def _is_observed(settings: ControlSettings, memory: ReplicasMemory, now: float) -> bool:
    return memory.since is not None and now - memory.since >= settings.scale_down_delay_s


def scale_down(
    inputs: ControlInputs, signals: Signals, gates: Gates, memory: ReplicasMemory, now: float
) -> Decision[int]:
    """Decide one step down to the highest recommendation of the stabilization window."""
    replicas, delay_s = inputs.replicas, inputs.settings.scale_down_delay_s
    target = _enough(inputs, memory)
    if target >= replicas:
        return decide(replicas, "Steady", "no change is needed")
    if not _is_observed(inputs.settings, memory, now):
        why = f"observed for less than spec.scaling.scaleDownDelaySeconds ({delay_s:.0f} s)"
        return no_change(replicas, "ScaleDownDelay", why)
    is_kept = surge_floor(inputs.settings, memory, now) >= replicas
    surge = f"requests waited too long within {SURGE_DELAYS * delay_s / 60:.0f} minutes"
    for why in (
        surge if is_kept and not gates.releases else "",
        gates.removal,
        _unproven(inputs, signals, memory, now),
    ):
        if why:
            return no_change(replicas, "ScaleDownBlocked", why)
    if now - max(memory.lowered, memory.raised) < DOWN_EVERY_REPLICA_S:
        return no_change(replicas, "ScaleDownRateLimited", "at most one scale-down step per minute")
    if is_kept:
        why = "a service that the GPU budget limits needs the accelerators kept for the next surge"
        return decide(replicas - 1, RELEASED, why)
    step = max(1, math.floor(DOWN_SHARE * replicas))
    return decide(
        max(target, replicas - step),
        "LoadFell",
        f"{target} replicas were enough for the last {delay_s:.0f} s",
    )
