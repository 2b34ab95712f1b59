"""Scale-down of replicas: complete and fresh samples, closed breakers, an empty queue, enough capacity.

Each requirement is a check of its own, and the first that fails is the decision's reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.autoscale.constants import (
    ASKED_KEPT_S,
    CARRY_KV_RATIO,
    CARRY_RATIO,
    DIRECT_WHOLE_S,
    DOWN_EVERY_REPLICA_S,
    DOWN_SHARE,
    SURGE_DELAYS,
)
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.objectives import wait_is_near
from fleetkeeper.autoscale.rules.replica_view import ReplicaView
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.types import ControlInputs, Decision, Grade, decide, no_change

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


def _unknown(view: ReplicaView) -> str:
    if view.signals.grade is not Grade.FRESH:
        return f"signals are {view.signals.grade.lower()}"
    if view.signals.coverage < 1.0:
        return f"only {view.signals.reporting_pods} of {view.signals.ready_pods} ready pods report"
    return ""


def _overdue(view: ReplicaView) -> str:
    count = view.signals.overdue_pods
    return f"samples of {count} replicas are overdue" if count else ""


def with_direct_reads(view: ReplicaView, memory: ReplicasMemory, now: float) -> ReplicasMemory:
    """Return the memory, noting whether every ready pod has fresh samples that were read directly."""
    if view.inputs.checks_directly:
        direct = view.signals.is_direct
    else:
        direct = view.signals.source is Source.DIRECT and not view.inputs.prometheus_lost
    whole = direct and not _unknown(view) and not _overdue(view)
    before = memory.direct_since
    since = (now if before is None else before) if whole else None
    return memory if since == before else replace(memory, direct_since=since)


def _fallback_source(view: ReplicaView, memory: ReplicasMemory, now: float) -> str:
    """Return why the source of the samples does not allow a scale-down, or an empty string.

    Direct reads allow none while Prometheus is lost, nor before they were complete for long enough.
    Prometheus alone allows none if the pods can be read directly: another workload could export series
    in their name.
    """
    if view.inputs.checks_directly:
        since = memory.direct_since
        return "" if since is not None and now - since >= DIRECT_WHOLE_S else UNCHECKED
    if view.signals.source is not Source.DIRECT:
        return ""
    if view.inputs.prometheus_lost:
        return "Prometheus returns no fresh samples"
    needed_s = max(DIRECT_WHOLE_S, view.settings.scale_down_delay_s)
    if memory.direct_since is not None and now - memory.direct_since >= needed_s:
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
    `confirms`: another service may lose a replica for this one.
    """
    if not inputs.checks_directly:
        return None
    lowers = replicas.reason in {"LoadFell", RELEASED} and replicas.value < inputs.replicas
    is_next = replicas.reason == "ScaleDownRateLimited" or replicas.detail == UNCHECKED
    if lowers or is_next or confirms or load != LoadBreaker():
        return now
    return asked_at if asked_at is not None and now - asked_at < ASKED_KEPT_S else None


def with_surge(
    view: ReplicaView,
    memory: ReplicasMemory,
    raised_to: int | None,
    now: float,
    *,
    in_time_only: bool = False,
) -> ReplicasMemory:
    """Return the memory with the replicas that are kept for the next surge.

    `raised_to`: a scale-up of this tick. It is kept if the long wait lasts, if requests are shed, or if
    it takes back a recent scale-down. A load that needs the kept replicas again keeps them for longer.
    `in_time_only`: only the deadline of a backlog required the scale-up, which is no surge.
    """
    kept_s = SURGE_DELAYS * view.settings.scale_down_delay_s
    before = memory.surge
    kept = before.replicas if before is not None and now - before.at < kept_s else 0
    needed = 0
    if raised_to is not None:
        if now - memory.released < kept_s:
            memory = replace(memory, missed=now)
        is_reversal = now - memory.lowered < kept_s
        is_surge = (view.wait_lasts or not view.breakers_closed) and not in_time_only
        if is_surge or is_reversal:
            needed = raised_to
    elif view.wait_lasts:
        needed = view.replicas
    if needed == 0 and not 0 < kept <= (view.needed_down or 0):
        return memory
    return replace(memory, surge=Surge(max(kept, needed), now))


def surge_floor(view: ReplicaView, memory: ReplicasMemory, now: float) -> int:
    """Return the replicas that are kept for the next surge; 0 if there was none for SURGE_DELAYS delays."""
    surge, delay_s = memory.surge, view.settings.scale_down_delay_s
    if surge is None or now - surge.at >= SURGE_DELAYS * delay_s:
        return 0
    return surge.replicas


def _pending(view: ReplicaView) -> str:
    count = view.supply.pending + view.supply.overdue or view.replicas - view.supply.ready
    if count <= 0:
        return ""
    return "1 pod is starting" if count == 1 else f"{count} pods are starting"


def _queue(view: ReplicaView) -> str:
    if not wait_is_near(view.signals, view.settings):
        return ""
    return f"queue wait is {view.signals.queue_wait_s:.2f} s, above a quarter of its objective"


def _breakers(view: ReplicaView) -> str:
    return "" if view.breakers_closed else "a circuit breaker is not closed"


def _hung(view: ReplicaView) -> str:
    return f"{view.hung} engines are hung" if view.hung else ""


def _carry(view: ReplicaView) -> str:
    left = view.replicas - 1
    if left < 1 or view.signals.idle:
        return ""
    if view.capacity <= 0:
        return "the capacity of a replica is not known yet"
    if view.signals.gauges.running / left > CARRY_RATIO * view.capacity:
        return f"{left} replicas would run above 85% of their capacity"
    if view.signals.kv_ratio * view.replicas / left > CARRY_KV_RATIO:
        return f"the KV cache of {left} replicas would be more than 80% full"
    return ""


OBJECTIONS: tuple[Callable[[ReplicaView], str], ...] = (
    _unknown,
    _overdue,
    _breakers,
    _pending,
    _hung,
    _queue,
    _carry,
)
"""Checks that block a scale-down, in order; each returns its reason or an empty string."""


def scale_down_blocker(view: ReplicaView) -> str:
    """Return the first reason that blocks a scale-down; empty if the other replicas have the capacity."""
    return next((why for check in OBJECTIONS if (why := check(view))), "")


def bounded(count: int, view: ReplicaView) -> int:
    """Return the count within minReplicas and maxReplicas."""
    settings = view.settings
    return min(settings.max_replicas, max(settings.min_replicas, count))


def _enough(view: ReplicaView, memory: ReplicasMemory) -> int:
    """Return the highest recommendation of the stabilization window."""
    return bounded(max((count for _, count in memory.recommendations), default=view.replicas), view)


def _is_observed(view: ReplicaView, memory: ReplicasMemory, now: float) -> bool:
    return memory.since is not None and now - memory.since >= view.settings.scale_down_delay_s


def kept_for_surge(view: ReplicaView, memory: ReplicasMemory, now: float) -> int:
    """Return how many replicas could be removed, if they were not kept for the next surge.

    0 for a service that needed a released replica again, for SURGE_DELAYS delays.
    """
    kept = view.replicas - _enough(view, memory)
    is_missed = now - memory.missed < SURGE_DELAYS * view.settings.scale_down_delay_s
    is_kept = surge_floor(view, memory, now) >= view.replicas and not is_missed
    if not is_kept or not _is_observed(view, memory, now) or scale_down_blocker(view):
        return 0
    return max(0, kept)


def scale_down(view: ReplicaView, memory: ReplicasMemory, now: float) -> Decision[int]:
    """Decide one step down to the highest recommendation of the stabilization window."""
    delay_s = view.settings.scale_down_delay_s
    steady = decide(view.replicas, "Steady", "no change is needed")
    target = _enough(view, memory)
    if target >= view.replicas:
        return steady
    if not _is_observed(view, memory, now):
        why = f"observed for less than spec.scaling.scaleDownDelaySeconds ({delay_s:.0f} s)"
        return no_change(view.replicas, "ScaleDownDelay", why)
    is_kept = surge_floor(view, memory, now) >= view.replicas
    surge = f"requests waited too long within {SURGE_DELAYS * delay_s / 60:.0f} minutes"
    for why in (
        surge if is_kept and not view.releases else "",
        *(check(view) for check in OBJECTIONS),
        _fallback_source(view, memory, now),
    ):
        if why:
            return no_change(view.replicas, "ScaleDownBlocked", why)
    if now - max(memory.lowered, memory.raised) < DOWN_EVERY_REPLICA_S:
        return no_change(
            view.replicas, "ScaleDownRateLimited", "at most one scale-down step per minute"
        )
    if is_kept:
        why = "a service that the GPU budget limits needs the accelerators kept for the next surge"
        return decide(view.replicas - 1, RELEASED, why)
    step = max(1, math.floor(DOWN_SHARE * view.replicas))
    return decide(
        max(target, view.replicas - step),
        "LoadFell",
        f"{target} replicas were enough for the last {delay_s:.0f} s",
    )
