"""Decide the recommended number of replicas: up at once, down one step at a time.

Missing data never lowers the number.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fleetkeeper.autoscale.constants import RECOMMENDATION_SLOTS, UP_SPAN_S, UP_STEP
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.rules.replica_view import ReplicaView
from fleetkeeper.autoscale.rules.scale_down import (
    RELEASED,
    ReplicasMemory,
    bounded,
    scale_down,
    with_direct_reads,
    with_surge,
)
from fleetkeeper.autoscale.types import Decision, Grade, decide, no_change


def with_recommendation(
    memory: ReplicasMemory, recommendation: int, delay_s: float, now: float
) -> ReplicasMemory:
    """Return the memory with this recommendation; slots older than the stabilization window are dropped."""
    slot_s = max(1.0, delay_s / RECOMMENDATION_SLOTS)
    start = math.floor(now / slot_s) * slot_s
    kept = [
        slot
        for slot in memory.recommendations
        if slot[0] > now - delay_s - slot_s and slot[0] < start
    ]
    last = max((w for s, w in memory.recommendations if s >= start), default=recommendation)
    since = now if memory.since is None else memory.since
    recommendations = (*kept, (start, max(recommendation, last)))
    if recommendations == memory.recommendations and since == memory.since:
        return memory
    return replace(memory, recommendations=recommendations, since=since)


def most_replicas_now(memory: ReplicasMemory, replicas: int, now: float) -> int:
    """Return the upper bound of a scale-up: within 15 s at most +4 or twice as many, as an HPA.

    Example: 3 ten seconds ago, 5 now: 7 at most. 1 ten seconds ago: 5 at most.
    """
    recent = [count for time, count in memory.recent_replicas if now - time < UP_SPAN_S]
    base = min([*recent, replicas])
    return max(base + UP_STEP, 2 * base)


def _wanted_up(view: ReplicaView) -> tuple[int, str, str]:
    """Return the number of replicas that the signals require, reason and detail; 0 if none are required.

    Without a trusted step-time model the staffing formula alone never scales up: only a missed
    objective does.
    """
    signals, settings = view.signals, view.settings
    supply = view.supply.ready + view.supply.pending - view.hung
    needed = view.needed_up or 0
    against = f"queue wait is {signals.queue_wait_s:.1f} s (objective {settings.queue_wait_objective_s:g} s)"
    if signals.queue_wait_s <= settings.queue_wait_objective_s:
        against = (
            f"of {signals.arrivals_per_s:.1f} requests/s, {signals.served_per_s:.1f} are served"
        )
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
        if view.supply.pending:
            return needed, "QueueWaitAboveTarget", against
        # If the model says that these replicas carry the load, a short queue drains by itself.
        if needed > supply or view.wait_lasts:
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
                f"{signals.arrivals_per_s:.1f} requests/s need {needed} replicas, which carry up to {view.capacity:.0f} sequences each"
            ),
        )
    return 0, "", ""


def _wanted_in_time(view: ReplicaView) -> tuple[int, str, str]:
    """Return what the signals require, or what the deadline of a backlog requires if that is more."""
    wanted, reason, detail = _wanted_up(view)
    need, most = view.deadline, view.settings.max_replicas
    if need is None or not view.adds_for_deadline:
        return wanted, reason, detail
    supply = view.supply.ready + view.supply.pending - view.hung
    in_time = min(need.up, most)
    if in_time <= max(min(wanted, most), supply):
        return wanted, reason, detail
    return need.up, BATCH_DEADLINE, need.detail(most)


def _up(view: ReplicaView, memory: ReplicasMemory, now: float) -> Decision[int] | None:
    wanted, reason, detail = _wanted_in_time(view)
    if wanted <= 0 or view.raise_first:
        return None
    overdue = view.supply.overdue
    target = bounded(min(wanted + overdue, most_replicas_now(memory, view.replicas, now)), view)
    if target <= view.replicas:
        return None
    if view.inputs.scale_up_blocked:
        return no_change(view.replicas, "ScaleUpBlocked", view.inputs.scale_up_blocked)
    if overdue:
        detail += f"; {overdue} pods have been starting for more than two cold starts"
    return decide(target, reason, detail)


def decide_replicas(
    view: ReplicaView, memory: ReplicasMemory, now: float
) -> tuple[Decision[int], ReplicasMemory]:
    """Return the recommended number and the new memory. Missing data never leads to a scale-down."""
    settings = view.settings
    if memory.since is not None and memory.since < view.inputs.started:
        # A new leader restarts the observation.
        memory = replace(memory, since=None, recommendations=(), direct_since=None)
    memory = with_direct_reads(view, memory, now)
    activation = settings.activation
    if activation.replicas is not None:
        reason = "Suspended" if activation.is_suspended else "ReplicasPinned"
        by = f"the number is set by {activation.state}"
        # What was observed before a pin does not justify a scale-down after it.
        memory = replace(memory, since=None, recommendations=())
        return decide(activation.replicas, reason, by), memory
    least = max(bounded(view.replicas, view), min(view.floor, settings.max_replicas))
    if least > view.replicas:
        raised = replace(memory, raised=now)
        return decide(least, "MinReplicas", f"at least {least} replicas are required"), raised
    if not view.signals.known:
        memory = with_recommendation(memory, view.replicas, settings.scale_down_delay_s, now)
        return no_change(
            view.replicas, "SignalsStale", "no fresh samples, so the replica count is unchanged"
        ), memory
    # While Prometheus is lost nothing is lowered, and its return does not lower on what was seen then.
    is_believed = view.signals.grade is Grade.FRESH and not view.inputs.prometheus_lost
    known = view.needed_down if is_believed else None
    in_time = view.deadline.down if view.deadline is not None else 0
    recommendation = view.replicas if known is None else max(known, view.floor, in_time)
    memory = with_recommendation(memory, recommendation, settings.scale_down_delay_s, now)
    recent_replicas = tuple(seen for seen in memory.recent_replicas if now - seen[0] < UP_SPAN_S)
    memory = replace(memory, recent_replicas=(*recent_replicas, (now, view.replicas)))
    decision = _up(view, memory, now)
    raised_to = decision.value if decision is not None and decision.valid else None
    in_time_only = decision is not None and decision.reason == BATCH_DEADLINE
    memory = with_surge(view, memory, raised_to, now, in_time_only=in_time_only)
    if decision is not None:
        return decision, replace(memory, raised=now) if decision.valid else memory
    if view.replicas > settings.max_replicas:
        return decide(
            settings.max_replicas, "MaxReplicas", "the number was above spec.scaling.maxReplicas"
        ), memory
    decision = scale_down(view, memory, now)
    if decision.valid and decision.value < view.replicas:
        released = now if decision.reason == RELEASED else memory.released
        memory = replace(memory, lowered=now, released=released)
    return decision, memory
