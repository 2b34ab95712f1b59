"""Rules that use room: raise the limits for a queue, and while batch time leaves room."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.autoscale.capacity.targets import moved_notch
from fleetkeeper.autoscale.constants import (
    KV_LOW_RATIO,
    QUEUE_UP_FACTOR,
    SHORT_STEP_RATIO,
    UP_EVERY_S,
    UP_FACTOR,
    USED_RATIO,
)
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, Step
from fleetkeeper.autoscale.rules.objectives import (
    has_room,
    is_full,
    judged_since,
    running_per_pod,
    wait_is_broken,
)
from fleetkeeper.autoscale.types import Limits, decide


def queue_wants_more(view: BatchView) -> bool:
    """Return whether requests wait although steps are short (below 0.7 of the objective) and KV is free."""
    signals, settings = view.signals, view.settings
    short = 0.0 < signals.batch_time_s < SHORT_STEP_RATIO * settings.batch_time_objective_s
    return short and signals.kv_ratio_max < KV_LOW_RATIO and wait_is_broken(signals, settings)


def raise_allowed(
    view: BatchView,
    memory: BatchMemory,
    now: float,
    *,
    need_use: bool = True,
    despite_gate: bool = False,
) -> bool:
    """Return whether a raise is allowed: breakers closed, no recent change, at least half of it in use.

    `despite_gate`: allow it while the load breaker is not closed, because this raise relieves the load.
    """
    limits = memory.limits
    used = running_per_pod(view.signals)
    return (
        view.may_raise
        and (despite_gate or not view.gated)
        and now - memory.changed >= UP_EVERY_S
        and now >= memory.rest_until
        and (not need_use or limits is None or used >= USED_RATIO * limits.sequences)
    )


def widen_for_queue(
    view: BatchView, memory: BatchMemory, limits: Limits, now: float
) -> Step | None:
    """Raise sequences by 25% if requests wait, steps are short, KV cache is free and the limit is reached.

    Steps are short if the mean batch time is below 0.7 of its objective. The raise is also allowed while
    requests are shed: a batch that is too small may be the cause.
    """
    signals = view.signals
    if not (queue_wants_more(view) and is_full(signals, limits.sequences)):
        return None
    if limits.sequences >= ceiling_sequences(view):
        return None
    if not raise_allowed(view, memory, now, despite_gate=True):
        return None
    sequences = max(limits.sequences + 1, round(limits.sequences * QUEUE_UP_FACTOR))
    return decide(
        replace(limits, sequences=min(sequences, ceiling_sequences(view))),
        "BatchTimeHeadroom",
        f"queue wait is {signals.queue_wait_s:.2f} s although steps take only {signals.batch_time_s * 1e3:.0f} ms",
    ), memory


def ceiling_sequences(view: BatchView) -> int:
    """Return the upper bound of a raise: twice the model's M* if known, else the start-up value.

    Limits may exceed M*, because the model errs, but not by far.
    """
    if view.targets is None:
        return view.settings.max_sequences
    return min(
        view.settings.max_sequences, max(2 * view.targets.sequences, view.settings.min_sequences)
    )


def ceiling_tokens(view: BatchView) -> int:
    """Return the upper bound of a raise of tokens: the model's T* if known, else the start-up value."""
    if view.targets is None or view.targets.tokens is None:
        return view.settings.max_tokens
    return view.targets.tokens


def lengthen(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Go one notch up if batch time attainment left room for four windows and requests wait."""
    windows = judged_since(view.signals.windows, memory.changed)
    if not has_room(windows, view.settings) or not wait_is_broken(view.signals, view.settings):
        return None
    if not raise_allowed(view, memory, now):
        return None
    detail = f"batch time left room for {len(windows)} windows, and requests are waiting"
    top = ceiling_sequences(view)
    if is_full(view.signals, limits.sequences) and limits.sequences < top:
        sequences = min(top, max(limits.sequences + 1, round(limits.sequences * UP_FACTOR)))
        return decide(replace(limits, sequences=sequences), "BatchTimeHeadroom", detail), memory
    more = min(moved_notch(limits.tokens, 1, view.settings), ceiling_tokens(view))
    if more > limits.tokens:
        return decide(replace(limits, tokens=more), "BatchTimeHeadroom", detail), memory
    return None


def step_up_possible(view: BatchView, memory: BatchMemory) -> bool:
    """Return whether limits can be raised: attainment leaves room and a ceiling is not reached.

    If they cannot and requests wait, more replicas are recommended.
    """
    limits = memory.limits
    if limits is None:
        return False
    windows = judged_since(view.signals.windows, memory.changed)
    below = limits.sequences < ceiling_sequences(view) or limits.tokens < ceiling_tokens(view)
    return below and has_room(windows, view.settings) and view.may_raise and not view.gated
