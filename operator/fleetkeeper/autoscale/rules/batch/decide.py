"""Decide the batch limits: an ordered chain of small rules, of which the first that applies decides.

Protection comes first (KV cache, batch time), then the step-time model, then room for more. Limits
stay within [floor, start-up value]. Without a model the chain follows measurements in the manner of
AIMD: up by 10%, down by 20%.
"""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.constants import DIRECTION_S
from fleetkeeper.autoscale.rules.batch.cuts import relieve_cap, relieve_kv, shorten
from fleetkeeper.autoscale.rules.batch.follow import follow_down, follow_up
from fleetkeeper.autoscale.rules.batch.raises import lengthen, widen_for_queue
from fleetkeeper.autoscale.rules.batch.values import (
    BatchMemory,
    BatchView,
    BeforeRaise,
    Rule,
    clamped,
    far_moves,
    start_up,
)
from fleetkeeper.autoscale.types import Decision, Limits, decide, no_change

RULES: tuple[Rule, ...] = (
    relieve_kv,
    relieve_cap,
    shorten,
    follow_down,
    follow_up,
    widen_for_queue,
    lengthen,
)
"""In order; the first that changes the limits decides."""


def decide_limits(
    view: BatchView, memory: BatchMemory, now: float
) -> tuple[Decision[Limits], BatchMemory]:
    """Return the limits for all pods and the new memory. Limits are unchanged if signals are stale."""
    settings = view.settings
    if settings.batching_mode is BatchingMode.FIXED:
        limits = start_up(settings)
        why = "limits are fixed by spec.batching.mode"
        return decide(limits, "Fixed", why), replace(memory, limits=limits)
    if memory.limits is None:
        limits = start_up(settings)
        first = replace(memory, limits=limits, changed=now)
        why = "limits start at the engine's start-up values"
        return decide(limits, "Starting", why), first
    current = clamped(memory.limits, settings)
    if current != memory.limits:
        memory = replace(memory, limits=current)
    if not view.signals.known:
        return no_change(
            current, "SignalsStale", "no fresh samples, so limits are unchanged"
        ), memory
    for rule in RULES:
        step = rule(view, memory, current, now)
        wanted = clamped(step[0].value, settings) if step else current
        if step and wanted != current:
            decision, after = step
            return replace(decision, value=wanted), _moved(view, after, current, wanted, now)
    return decide(current, "Steady", "no change is needed or possible"), memory


def direction(before: Limits, after: Limits) -> int:
    """Return -1 if either limit was lowered, else +1."""
    return -1 if after.sequences < before.sequences or after.tokens < before.tokens else 1


def _reversals(
    view: BatchView, memory: BatchMemory, before: Limits, after: Limits, now: float
) -> tuple[tuple[float, ...], tuple[int, int]]:
    """Return the changes of direction including this one, and the last directions of both limits."""
    reversals = [time for time in memory.reversals if now - time <= DIRECTION_S]
    directions = []
    moves = (after.sequences - before.sequences, after.tokens - before.tokens)
    far = far_moves(before, after, view.settings)
    for move, is_far, last in zip(moves, far, memory.last_directions, strict=True):
        sign = ((move > 0) - (move < 0)) * is_far
        if sign and last and sign != last:
            reversals.append(now)
        directions.append(sign or last)
    return tuple(reversals), (directions[0], directions[1])


def _moved(
    view: BatchView, memory: BatchMemory, current: Limits, wanted: Limits, now: float
) -> BatchMemory:
    """Return the memory after the limits change from `current` to `wanted`."""
    windows = view.signals.windows
    is_raise = direction(current, wanted) > 0
    attained = windows[-1].batch_attainment if windows else None
    before = None
    if is_raise and attained is not None:
        before = BeforeRaise(current, attained)
    reversals, directions = _reversals(view, memory, current, wanted, now)
    return replace(
        memory,
        limits=wanted,
        changed=now,
        raised=now if is_raise else memory.raised,
        before_raise=before,
        reversals=reversals,
        last_directions=directions,
    )
