"""Decide the recommended number of replicas: up at once, down one step at a time.

A scale-down needs complete and fresh samples, closed breakers, an empty queue and enough capacity in
the replicas that stay. Each requirement is a check of its own, and the first that fails is the
decision's reason. Missing data never lowers the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.autoscale.constants import (
    CARRY_KV_RATIO,
    CARRY_RATIO,
    DIRECT_WHOLE_S,
    DOWN_EVERY_REPLICA_S,
    DOWN_SHARE,
    RECOMMENDATION_SLOTS,
    TOO_FEW_KEPT_S,
    UP_SPAN_S,
    UP_STEP,
)
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Decision, Grade, decide, no_change


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Inputs of the replica rules.

    `replicas`: the live Deployment's number. `ready`, `pending`: pods (pending for at most two cold
    starts). `overdue`: pods pending for longer, which do not count as supply. `needed_up` counts pods
    that do not report as idle, `needed_down` counts them as full; None: not known. `capacity`: sequences
    that a replica can run within the objectives. `batch_at_limit`: batch limits cannot be raised.
    `demand`: batch limits are at their floor and batch time is still too long. `raise_first`: batch
    limits were just raised, which may be enough. `floor`: the number below which the control breaker
    allows no scale-down. `up_blocked`: why more replicas would not help, else empty.
    `prometheus_lost`: Prometheus is configured but has no fresh samples. `checks_directly`: samples
    come from Prometheus and can be checked against the pods.
    """

    signals: Signals
    settings: ControlSettings
    replicas: int
    ready: int
    pending: int = 0
    overdue: int = 0
    needed_up: int | None = None
    needed_down: int | None = None
    capacity: float = 0.0
    model_trusted: bool = False
    wait_broken: bool = False
    batch_at_limit: bool = False
    demand: bool = False
    raise_first: bool = False
    breakers_closed: bool = True
    floor: int = 0
    up_blocked: str = ""
    hung: int = 0
    prometheus_lost: bool = False
    checks_directly: bool = False


UNCHECKED: Final = "replicas must be read directly before one is removed"
"""Why a scale-down that rests on Prometheus alone has to wait."""


@dataclass(frozen=True, slots=True)
class TooFew:
    """A number of replicas that was too small: it served `served_per_s` requests/s while others waited."""

    replicas: int
    served_per_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ReplicasMemory:
    """The memory of the replica rules.

    `recommendations`: (slot start, highest recommendation) over the stabilization window
    (`scale_down_delay_s`). `since`: start of the observation. `recent_replicas`: (time, live replicas)
    over the last minute, for the bound on steps up. `lowered`, `raised`: times of the last changes.
    `direct_since`: since when every pod was read directly, without a gap and with Prometheus not lost.
    `too_few`: the last number of replicas that was not enough.
    """

    recommendations: tuple[tuple[float, int], ...] = ()
    since: float | None = None
    recent_replicas: tuple[tuple[float, int], ...] = ()
    lowered: float = 0.0
    raised: float = 0.0
    direct_since: float | None = None
    too_few: TooFew | None = None


def with_recommendation(
    memory: ReplicasMemory, recommendation: int, delay_s: float, now: float
) -> ReplicasMemory:
    """Return the memory with this recommendation; slots older than the stabilization window are dropped."""
    slot_s = max(1.0, delay_s / RECOMMENDATION_SLOTS)
    start = math.floor(now / slot_s) * slot_s
    kept = [
        held
        for held in memory.recommendations
        if held[0] > now - delay_s - slot_s and held[0] < start
    ]
    last = max((w for s, w in memory.recommendations if s >= start), default=recommendation)
    since = now if memory.since is None else memory.since
    recommendations = (*kept, (start, max(recommendation, last)))
    if recommendations == memory.recommendations and since == memory.since:
        return memory
    return replace(memory, recommendations=recommendations, since=since)


def most_replicas_now(memory: ReplicasMemory, replicas: int, now: float) -> int:
    """Return the upper bound of a scale-up: within 60 s at most +2 or twice as many.

    Example: 3 a minute ago, 5 now: 6 at most. 1 a minute ago: 3 at most.
    """
    recent = [count for time, count in memory.recent_replicas if now - time < UP_SPAN_S]
    base = min([*recent, replicas])
    return max(base + UP_STEP, 2 * base)


def _unknown(view: ReplicaView) -> str:
    if view.signals.grade is not Grade.FRESH:
        return f"signals are {view.signals.grade.lower()}"
    if view.signals.coverage < 1.0:
        return f"only {view.signals.reporting_pods} of {view.signals.ready_pods} ready pods report"
    return ""


def _overdue(view: ReplicaView) -> str:
    count = view.signals.overdue_pods
    return f"samples of {count} replicas are overdue" if count else ""


def _watched(view: ReplicaView, memory: ReplicasMemory, now: float) -> ReplicasMemory:
    """Return the memory, noting whether every ready pod has fresh samples that were read directly."""
    if view.checks_directly:
        direct = view.signals.is_direct
    else:
        direct = view.signals.source is Source.DIRECT and not view.prometheus_lost
    whole = direct and not _unknown(view) and not _overdue(view)
    held = memory.direct_since
    since = (now if held is None else held) if whole else None
    return memory if since == held else replace(memory, direct_since=since)


def _fallback_source(view: ReplicaView, memory: ReplicasMemory, now: float) -> str:
    """Return why the source of the samples does not allow a scale-down, or an empty string.

    Direct reads allow none while Prometheus is lost, nor before they were complete for long enough.
    Prometheus alone allows none if the pods can be read directly: another workload could export series
    in their name.
    """
    if view.checks_directly:
        since = memory.direct_since
        return "" if since is not None and now - since >= DIRECT_WHOLE_S else UNCHECKED
    if view.signals.source is not Source.DIRECT:
        return ""
    if view.prometheus_lost:
        return "Prometheus returns no fresh samples"
    needed_s = max(DIRECT_WHOLE_S, view.settings.scale_down_delay_s)
    if memory.direct_since is not None and now - memory.direct_since >= needed_s:
        return ""
    return f"every replica must be read directly for {needed_s:.0f} s without a gap first"


def would_lower(decision: Decision[int], replicas: int) -> bool:
    """Return whether this is a scale-down, or one that only the pace or a missing direct read delays."""
    is_next = decision.reason == "ScaleDownRateLimited" or decision.detail == UNCHECKED
    return is_next or (decision.reason == "LoadFell" and decision.value < replicas)


def _seen_too_few(view: ReplicaView, memory: ReplicasMemory, now: float) -> ReplicasMemory:
    """Return the memory with the rate that the fleet serves at its batch limit while requests wait.

    This measurement complements the step-time model, which does not see that steps of a pod with a
    throttled CPU take longer.
    """
    served = view.signals.served_per_s
    full = view.wait_broken and view.batch_at_limit and view.ready > 0 and served > 0
    if not full or view.hung or _unknown(view) or _overdue(view):
        return memory
    held = memory.too_few
    if held is not None and held.replicas == view.ready and now - held.at < TOO_FEW_KEPT_S:
        served = max(served, held.served_per_s)
    return replace(memory, too_few=TooFew(view.ready, served, now))


def _too_few(view: ReplicaView, memory: ReplicasMemory, now: float) -> str:
    held, left = memory.too_few, view.replicas - 1
    if held is None or left < 1 or now - held.at >= TOO_FEW_KEPT_S:
        return ""
    carried = held.served_per_s * left / held.replicas
    if view.signals.arrivals_per_s <= CARRY_RATIO * carried:
        return ""
    return (
        f"{held.replicas} replicas served only {held.served_per_s:.1f} requests/s while others waited; "
        f"{view.signals.arrivals_per_s:.1f} requests/s arrive now"
    )


def _pending(view: ReplicaView) -> str:
    count = view.pending + view.overdue
    return f"{count} pods are starting" if count or view.ready < view.replicas else ""


def _queue(view: ReplicaView) -> str:
    return f"{view.signals.waiting:.0f} requests are waiting" if view.signals.waiting > 0 else ""


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


def _bounded(count: int, view: ReplicaView) -> int:
    settings = view.settings
    return min(settings.max_replicas, max(settings.min_replicas, count))


def _wanted_up(view: ReplicaView) -> tuple[int, str, str]:
    """Return the number of replicas that the signals require, reason and detail; 0 if none are required.

    Without a trusted step-time model the staffing formula alone never scales up: only a missed
    objective does.
    """
    signals, settings = view.signals, view.settings
    supply = view.ready + view.pending - view.hung
    needed = view.needed_up or 0
    against = f"queue wait is {signals.queue_wait_s:.1f} s (objective {settings.queue_wait_objective_s:g} s)"
    if view.demand:
        return (
            max(needed, view.replicas + 1),
            "MinimumBatchTooSlow",
            (
                f"batch time is {signals.batch_time_s * 1e3:.0f} ms (objective "
                f"{settings.batch_time_objective_s * 1e3:.0f} ms) at the lowest batch limits"
            ),
        )
    if view.wait_broken and view.batch_at_limit:
        if view.pending:
            return (needed if view.model_trusted else 0), "QueueWaitAboveTarget", against
        return (
            max(needed, supply + 1),
            "QueueWaitAboveTarget",
            f"{against}, and batch limits cannot be raised",
        )
    if view.model_trusted and needed > supply and not view.raise_first:
        return (
            needed,
            "LoadForecast",
            (
                f"{signals.arrivals_per_s:.1f} requests/s and their forecast need {needed} replicas of {view.capacity:.0f} sequences each"
            ),
        )
    return 0, "", ""


def _up(view: ReplicaView, memory: ReplicasMemory, now: float) -> Decision[int] | None:
    wanted, reason, detail = _wanted_up(view)
    if wanted <= 0 or view.raise_first:
        return None
    overdue = view.overdue
    target = _bounded(min(wanted + overdue, most_replicas_now(memory, view.replicas, now)), view)
    if target <= view.replicas:
        return None
    if view.up_blocked:
        return no_change(view.replicas, "ScaleUpBlocked", view.up_blocked)
    if overdue:
        detail += f"; {overdue} pods have been starting for more than two cold starts"
    return decide(target, reason, detail)


def _down(view: ReplicaView, memory: ReplicasMemory, now: float) -> Decision[int]:
    delay_s = view.settings.scale_down_delay_s
    steady = decide(view.replicas, "Steady", "no change is needed")
    recommendation = max((count for _, count in memory.recommendations), default=view.replicas)
    target = _bounded(recommendation, view)
    if target >= view.replicas:
        is_model_alone = view.needed_down is not None and view.needed_down < view.replicas
        why = _too_few(view, memory, now) if is_model_alone else ""
        return no_change(view.replicas, "ScaleDownBlocked", why) if why else steady
    if memory.since is None or now - memory.since < delay_s:
        why = f"observed for less than spec.scaling.scaleDownDelaySeconds ({delay_s:.0f} s)"
        return no_change(view.replicas, "ScaleDownDelay", why)
    for why in (*(check(view) for check in OBJECTIONS), _fallback_source(view, memory, now)):
        if why:
            return no_change(view.replicas, "ScaleDownBlocked", why)
    if now - max(memory.lowered, memory.raised) < DOWN_EVERY_REPLICA_S:
        return no_change(
            view.replicas, "ScaleDownRateLimited", "at most one scale-down step per minute"
        )
    step = max(1, math.floor(DOWN_SHARE * view.replicas))
    return decide(
        max(target, view.replicas - step),
        "LoadFell",
        f"{target} replicas were enough for the last {delay_s:.0f} s",
    )


def decide_replicas(
    view: ReplicaView, memory: ReplicasMemory, now: float
) -> tuple[Decision[int], ReplicasMemory]:
    """Return the recommended number and the new memory. Missing data never leads to a scale-down."""
    settings = view.settings
    memory = _watched(view, memory, now)
    if settings.pinned_replicas is not None:
        return decide(
            settings.pinned_replicas, "ReplicasPinned", "the number is set by spec.replicas"
        ), memory
    bounded = max(_bounded(view.replicas, view), min(view.floor, settings.max_replicas))
    if bounded > view.replicas:
        raised = replace(memory, raised=now)
        return decide(bounded, "MinReplicas", f"at least {bounded} replicas are required"), raised
    if not view.signals.known:
        memory = with_recommendation(memory, view.replicas, settings.scale_down_delay_s, now)
        return no_change(
            view.replicas, "SignalsStale", "no fresh samples, so the replica count is unchanged"
        ), memory
    memory = _seen_too_few(view, memory, now)
    # While Prometheus is lost nothing is lowered, and its return does not lower on what was seen then.
    is_believed = view.signals.grade is Grade.FRESH and not view.prometheus_lost
    known = view.needed_down if is_believed else None
    # A number that was too small for this load is not recommended: the stabilization window starts
    # when the load falls.
    least = view.replicas if _too_few(view, memory, now) else view.floor
    recommendation = view.replicas if known is None else max(known, least, view.floor)
    memory = with_recommendation(memory, recommendation, settings.scale_down_delay_s, now)
    recent_replicas = tuple(held for held in memory.recent_replicas if now - held[0] < UP_SPAN_S)
    memory = replace(memory, recent_replicas=(*recent_replicas, (now, view.replicas)))
    decision = _up(view, memory, now)
    if decision is not None:
        return decision, replace(memory, raised=now) if decision.valid else memory
    if view.replicas > settings.max_replicas:
        return decide(
            settings.max_replicas, "MaxReplicas", "the number was above spec.scaling.maxReplicas"
        ), memory
    decision = _down(view, memory, now)
    if decision.valid and decision.value < view.replicas:
        memory = replace(memory, lowered=now)
    return decision, memory
