"""Rules that follow the targets of the step-time model, down and up."""

from __future__ import annotations

import math
from dataclasses import replace

from fleetkeeper.autoscale.capacity.targets import Targets, notch_down
from fleetkeeper.autoscale.constants import (
    DOWN_EVERY_S,
    FEED_FORWARD_RATIO,
    MODEL_CUT_FACTOR,
    UP_EVERY_S,
)
from fleetkeeper.autoscale.rules.batch.raises import queue_wants_more, raise_allowed
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, Step, clamped
from fleetkeeper.autoscale.rules.objectives import running_per_pod
from fleetkeeper.autoscale.types import ControlSettings, Limits, decide


def follow_down(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Follow the model's targets down, also the first time that they are known."""
    return _follow(view, memory, limits, now, down=True)


def follow_up(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Follow the model's targets up where a raise is allowed."""
    return _follow(view, memory, limits, now, down=False)


def _follow(
    view: BatchView, memory: BatchMemory, limits: Limits, now: float, *, down: bool
) -> Step | None:
    targets = view.targets
    if targets is None or view.model_frozen or memory.before_cut is not None:
        return None
    aim = _shifted(targets, memory, limits, view.settings)
    least = _least_followed(view, memory, limits, now)
    wanted = replace(aim, sequences=max(aim.sequences, least))
    lower = wanted.sequences < limits.sequences or wanted.tokens < limits.tokens
    if wanted == limits or lower is not down:
        return None
    if down and now - memory.changed < DOWN_EVERY_S:
        return None
    if not down and not _may_follow_up(view, memory, now):
        return None
    followed = Limits(targets.sequences, targets.tokens or limits.tokens)
    if wanted.sequences > aim.sequences:
        # The part that was not applied remains to be followed by the next move.
        share = wanted.sequences / aim.sequences
        followed = replace(followed, sequences=math.ceil(targets.sequences * share))
    detail = f"the step-time model predicts a capacity of {targets.capacity:.0f} sequences at {0.9 * view.settings.batch_time_objective_s * 1e3:.0f} ms"
    return decide(wanted, "FollowsStepTimeModel", detail), replace(memory, followed=followed)


def _least_followed(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> int:
    """Return the fewest sequences that one move with the model may leave.

    Half of them; all of them within 30 s of the last cut, unless the model is followed for the first
    time; and those that run while replicas are pending. A model that was fitted while steps were slow
    for a short time (a neighbor's start) predicts the floor: halving costs less until it has learned
    more. If measured steps are too long, `shorten` has already cut.
    """
    least = math.ceil(MODEL_CUT_FACTOR * limits.sequences)
    was_cut = memory.followed is not None and memory.changed > memory.raised
    if was_cut and now - memory.changed < UP_EVERY_S:
        least = limits.sequences
    if view.pending:
        least = max(least, min(math.ceil(running_per_pod(view.signals)), limits.sequences))
    return least


def _may_follow_up(view: BatchView, memory: BatchMemory, now: float) -> bool:
    """Return whether limits may follow the model up; the first time at once, to replace the first guess."""
    if memory.followed is None:
        return view.may_raise and now >= memory.rest_until
    return raise_allowed(view, memory, now, despite_gate=queue_wants_more(view))


def _shifted(
    targets: Targets, memory: BatchMemory, limits: Limits, settings: ControlSettings
) -> Limits:
    """Return the limits, moved by as much as the targets moved since they were last followed.

    The difference between limits and targets that the other rules made is kept.
    """
    before = memory.followed
    if before is None:
        return clamped(Limits(targets.sequences, targets.tokens or limits.tokens), settings)
    ratio = targets.sequences / before.sequences
    sequences = limits.sequences
    if abs(ratio - 1.0) > FEED_FORWARD_RATIO:
        sequences = round(limits.sequences * ratio)
    tokens = limits.tokens
    if targets.tokens is not None and targets.tokens != before.tokens:
        tokens = round(limits.tokens * targets.tokens / before.tokens)
        tokens = notch_down(tokens, settings)
    return clamped(Limits(sequences, tokens), settings)
