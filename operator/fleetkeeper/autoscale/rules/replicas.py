"""Decide the recommended number of replicas: up at once, down one step at a time.

Missing data never lowers the number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.constants import RECOMMENDATION_SLOTS, UP_SPAN_S, UP_STEP
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.rules.need import Need
from fleetkeeper.autoscale.rules.objectives import wait_is_broken
from fleetkeeper.autoscale.rules.scale_down import (
    RELEASED,
    Gates,
    ReplicasMemory,
    bounded,
    scale_down,
    with_direct_reads,
    with_surge,
)
from fleetkeeper.autoscale.types import ControlInputs, Decision, Grade, decide, no_change
from fleetkeeper.common.activation import State

_SET_BY: Final = {State.SUSPENDED: "Suspended", State.ASLEEP: "Asleep"}
"""Reasons of a number that is not scaled, other than ReplicasPinned."""


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
    newest = start, max(recommendation, last)
    return replace(memory, recommendations=(*kept, newest), since=since)


def most_replicas_now(memory: ReplicasMemory, replicas: int, now: float) -> int:
    """Return the upper bound of a scale-up: within 15 s at most +4 or twice as many, as an HPA.

    Example: 3 ten seconds ago, 5 now: 7 at most. 1 ten seconds ago: 5 at most.
    """
    recent = [count for time, count in memory.recent_replicas if now - time < UP_SPAN_S]
    base = min([*recent, replicas])
    return max(base + UP_STEP, 2 * base)


def _wanted_up(inputs: ControlInputs, need: Need, supply: Supply) -> tuple[int, str, str]:
    """Return the number of replicas that the signals require, reason and detail; 0 if none are required.

    Without a trusted step-time model arrivals alone never scale up: only a missed objective does.
    """
    signals, settings = need.signals, inputs.settings
    needed = need.needed or 0
    rates = f"{signals.arrivals_per_s:.1f} requests/s"
    if need.too_slow:
        return (
            max(needed, inputs.replicas + 1),
            "MinimumBatchTooSlow",
            (
                f"batch time is {signals.batch_time_s * 1e3:.0f} ms (objective "
                f"{settings.batch_time_objective_s * 1e3:.0f} ms) at the lowest batch limits"
            ),
        )
    # If the model says that these replicas carry the load, a short queue drains by itself.
    # Queue wait is a mean from before the newest replicas were ready. Without a model nothing else shows
    # whether they are enough.
    coming = supply.pending + (0 if need.is_trusted else supply.new)
    if need.waits and (coming or needed > supply.serving or need.wait_lasts):
        against = f"queue wait is {signals.queue_wait_s:.1f} s (objective {settings.queue_wait_objective_s:g} s)"
        if not wait_is_broken(signals, settings):
            against = f"of {rates}, {signals.served_per_s:.1f} are served"
        if coming:
            return needed, "QueueWaitAboveTarget", against
        more = max(needed, supply.serving + 1)
        return more, "QueueWaitAboveTarget", f"{against}, and batch limits cannot be raised"
    if need.is_trusted and needed > supply.serving:
        return (
            needed,
            "LoadForecast",
            f"{rates} need {needed} replicas, which carry up to {need.capacity:.0f} sequences each",
        )
    return 0, "", ""


def _wanted_in_time(inputs: ControlInputs, need: Need, supply: Supply) -> tuple[int, str, str]:
    """Return what the signals require, or what the deadline of a backlog requires if that is more."""
    wanted, reason, detail = _wanted_up(inputs, need, supply)
    deadline, most = need.deadline, inputs.settings.max_replicas
    if deadline is None or not deadline.adds:
        return wanted, reason, detail
    if min(deadline.up, most) <= max(min(wanted, most), supply.serving):
        return wanted, reason, detail
    return deadline.up, BATCH_DEADLINE, deadline.detail(most)


def _up(
    inputs: ControlInputs, need: Need, supply: Supply, memory: ReplicasMemory, now: float
) -> Decision[int] | None:
    """Decide a scale-up; None if none is required, or batch limits were just raised."""
    replicas = inputs.replicas
    wanted, reason, detail = _wanted_in_time(inputs, need, supply)
    if wanted <= 0:
        return None
    most = most_replicas_now(memory, replicas, now)
    target = bounded(min(wanted + supply.overdue, most), inputs.settings)
    if target <= replicas:
        return None
    if inputs.scale_up_blocked:
        return no_change(replicas, "ScaleUpBlocked", inputs.scale_up_blocked)
    if supply.overdue:
        detail += f"; {supply.overdue} pods have been starting for more than two cold starts"
    return decide(target, reason, detail)


def decide_replicas(
    inputs: ControlInputs,
    need: Need,
    supply: Supply,
    gates: Gates,
    memory: ReplicasMemory,
    *,
    now: float,
) -> tuple[Decision[int], ReplicasMemory]:
    """Return the recommended number and the new memory. Missing data never leads to a scale-down."""
    settings, replicas, signals = inputs.settings, inputs.replicas, need.signals
    if memory.since is not None and memory.since < inputs.started:
        # A new leader restarts the observation.
        memory = replace(memory, since=None, recommendations=(), direct_since=None)
    memory = with_direct_reads(inputs, signals, memory, now)
    activation = settings.activation
    if activation.replicas is not None:
        reason = _SET_BY.get(activation.state, "ReplicasPinned")
        by = f"the number is set by {activation.state}"
        # What was observed before a pin does not justify a scale-down after it.
        memory = replace(memory, since=None, recommendations=())
        return decide(activation.replicas, reason, by), memory
    least = max(bounded(replicas, settings), min(gates.floor, settings.max_replicas))
    if least > replicas:
        raised = replace(memory, raised=now)
        return decide(least, "MinReplicas", f"at least {least} replicas are required"), raised
    if not signals.known:
        memory = with_recommendation(memory, replicas, settings.scale_down_delay_s, now)
        return no_change(
            replicas, "SignalsStale", "no fresh samples, so the replica count is unchanged"
        ), memory
    # While Prometheus is lost nothing is lowered, and its return does not lower on what was seen then.
    is_believed = signals.grade is Grade.FRESH and not inputs.prometheus_lost
    recommendation = replicas
    if is_believed and need.needed is not None:
        silent = max(0, signals.ready_pods - signals.reporting_pods)
        in_time = need.deadline.down if need.deadline is not None else 0
        recommendation = max(need.needed + silent, gates.floor, in_time)
    memory = with_recommendation(memory, recommendation, settings.scale_down_delay_s, now)
    recent_replicas = tuple(seen for seen in memory.recent_replicas if now - seen[0] < UP_SPAN_S)
    memory = replace(memory, recent_replicas=(*recent_replicas, (now, replicas)))
    decision = _up(inputs, need, supply, memory, now)
    memory = with_surge(inputs, need, gates, memory, now, raised=decision)
    if decision is not None:
        return decision, replace(memory, raised=now) if decision.valid else memory
    if replicas > settings.max_replicas:
        why = "the number was above spec.scaling.maxReplicas"
        return decide(settings.max_replicas, "MaxReplicas", why), memory
    decision = scale_down(inputs, signals, gates, memory, now)
    if decision.valid and decision.value < replicas:
        released = now if decision.reason == RELEASED else memory.released
        memory = replace(memory, lowered=now, released=released)
    return decision, memory
