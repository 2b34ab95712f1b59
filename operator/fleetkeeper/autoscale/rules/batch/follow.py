"""Rules that follow the targets of the step-time model: down to protect an objective, up for a queue."""

from __future__ import annotations

import math
from dataclasses import replace

from fleetkeeper.autoscale.capacity.targets import notches_between
from fleetkeeper.autoscale.constants import (
    DOWN_EVERY_S,
    FEED_FORWARD_RATIO,
    MODEL_CUT_FACTOR,
    UP_EVERY_S,
)
from fleetkeeper.autoscale.rules.batch.raises import queue_wants_more, raise_allowed
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, Step, clamped
from fleetkeeper.autoscale.rules.objectives import (
    batch_time_is_near,
    is_slow,
    judged_since,
    running_per_pod,
    wait_is_broken,
    wait_is_near,
)
from fleetkeeper.autoscale.types import Limits, decide


def follow_down(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Lower the limits to the model's targets while batch time is near its objective.

    A quiet engine keeps its limits: only single long steps lower its tokens. Waiting requests lower
    nothing: smaller steps would cost throughput.
    """
    aim = _aim(view, limits)
    if aim is None or now - memory.changed < DOWN_EVERY_S:
        return None
    near = batch_time_is_near(view.signals, view.settings)
    if not near and not is_slow(judged_since(view.signals.windows, memory.changed), view.settings):
        return None
    sequences = limits.sequences
    if near and aim.sequences < (1 - FEED_FORWARD_RATIO) * sequences:
        sequences = min(sequences, max(aim.sequences, _least_followed(view, memory, limits, now)))
    return _step(view, memory, limits, Limits(sequences, min(limits.tokens, aim.tokens)))


def follow_up(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Raise the limits to the model's targets while queue wait is near its objective."""
    aim = _aim(view, limits)
    if aim is None or not wait_is_near(view.signals, view.settings):
        return None
    if not raise_allowed(view, memory, now, need_use=False, despite_gate=queue_wants_more(view)):
        return None
    sequences = limits.sequences
    if aim.sequences > (1 + FEED_FORWARD_RATIO) * sequences:
        sequences = aim.sequences
    return _step(view, memory, limits, Limits(sequences, max(limits.tokens, aim.tokens)))


def _aim(view: BatchView, limits: Limits) -> Limits | None:
    """Return the model's targets within the bounds; None while limits must not follow them.

    The fit moves T* by a notch from minute to minute. So T* decides moves of two notches or more. A notch
    down needs steps that miss the objective (`shorten`), a notch up requests that wait too long.
    """
    targets, settings = view.targets, view.settings
    if targets is None or view.model_missed:
        return None
    aim = clamped(Limits(targets.sequences, targets.tokens or limits.tokens), settings)
    apart = notches_between(limits.tokens, aim.tokens, settings)
    if apart == -1 or (apart == 1 and not wait_is_broken(view.signals, settings)):
        return replace(aim, tokens=limits.tokens)
    return aim


def _step(view: BatchView, memory: BatchMemory, limits: Limits, wanted: Limits) -> Step | None:
    if wanted == limits or view.targets is None:
        return None
    objective_ms = view.settings.batch_time_objective_s * 1e3
    detail = (
        f"the step-time model predicts that steps of {wanted.tokens} tokens and "
        f"{wanted.sequences} sequences stay within {objective_ms:.0f} ms"
    )
    return decide(wanted, "FollowsStepTimeModel", detail), memory


def _least_followed(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> int:
    """Return the fewest sequences that one move with the model may leave.

    Half of them; all of them within 30 s of the last cut; and those that run while replicas are pending.
    A model that was fitted while steps were slow for a short time (a neighbor's start) predicts the
    floor: halving costs less until it has learned more. If measured steps are too long, `shorten` has
    already cut.
    """
    least = math.ceil(MODEL_CUT_FACTOR * limits.sequences)
    if memory.changed > memory.raised and now - memory.changed < UP_EVERY_S:
        least = limits.sequences
    if view.pending:
        least = max(least, min(math.ceil(running_per_pod(view.signals)), limits.sequences))
    return least
