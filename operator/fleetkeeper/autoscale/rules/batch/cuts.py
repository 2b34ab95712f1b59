"""Rules that protect: lower the limits for the KV cache, the memory cap and the batch time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fleetkeeper.autoscale.capacity.targets import moved_notch, notch_down
from fleetkeeper.autoscale.constants import (
    CANARY_REST_S,
    CUT_FACTOR,
    DOWN_EVERY_S,
    DOWN_FACTOR,
    KV_HIGH_RATIO,
    PREEMPTIONS_PER_S,
    UP_EVERY_S,
)
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, Step
from fleetkeeper.autoscale.rules.objectives import (
    batch_time_is_near,
    is_slow,
    judged_since,
    running_per_pod,
    wait_is_near,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import Limits, decide


def relieve_kv(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Cut sequences to 0.8 of those that run if requests are preempted or the KV cache is nearly full.

    While replicas are pending, sequences are cut to those that run.
    """
    signals = view.signals
    preempting = signals.preemptions_per_pod_s > PREEMPTIONS_PER_S
    if (
        not (preempting or signals.kv_ratio_max > KV_HIGH_RATIO)
        or now - memory.changed < DOWN_EVERY_S
    ):
        return None
    running = running_per_pod(signals)
    sequences = math.floor((1.0 if view.pending else CUT_FACTOR) * running)
    if sequences < 1 or sequences >= limits.sequences:
        return None
    return decide(
        replace(limits, sequences=sequences),
        "KVCachePressure",
        f"KV cache is {signals.kv_ratio_max:.0%} full, with {signals.preemptions_per_pod_s:.2f} preemptions/s per pod",
    ), memory


def relieve_cap(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Lower sequences if memory use is above the cap, at most every 30 s."""
    cap = view.settings.cap_percent / 100
    if view.signals.memory_used_ratio <= cap or now - memory.changed < UP_EVERY_S:
        return None
    running = running_per_pod(view.signals)
    sequences = math.floor(CUT_FACTOR * min(limits.sequences, max(running, 1.0)))
    if sequences >= limits.sequences or limits.sequences <= view.settings.min_sequences:
        return None
    return decide(
        replace(limits, sequences=sequences),
        "MemoryAboveCap",
        f"memory use is {view.signals.memory_used_ratio:.0%}, above the cap of {cap:.0%}",
    ), memory


def shorten(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Lower the limits, tokens first, if batch time attainment is low in 2 of 3 windows.

    A mean step above the objective counts, too: steps that long are few, and a window needs 100 steps. If
    the limits are not above the model's targets, the model errs, and nothing is raised for a while.
    """
    settings, signals = view.settings, view.signals
    if now - memory.changed < DOWN_EVERY_S:
        return None
    windows = judged_since(signals.windows, memory.changed)
    mean_s = _mean_step_s(signals, memory.changed)
    targets = view.targets
    at_target = targets is not None and limits.tokens <= (targets.tokens or 0)
    if not _is_too_slow(view, windows, mean_s, at_target=at_target):
        return None
    objective_ms = settings.batch_time_objective_s * 1e3
    detail = f"mean batch time is {mean_s * 1e3:.0f} ms (objective {objective_ms:.0f} ms)"
    if windows:
        attained = windows[-1].batch_attainment or 0.0
        detail = f"{attained:.1%} of steps are within {objective_ms:.0f} ms"
    if at_target:
        memory = replace(memory, rest_until=now + CANARY_REST_S)
    fewer = _fewer_tokens(view, limits, mean_s)
    if fewer < limits.tokens and signals.rates.prompt_tokens > 0:
        return decide(replace(limits, tokens=fewer), "BatchTimeAboveTarget", detail), memory
    sequences = _fewer_sequences(view, limits)
    if sequences >= limits.sequences:
        return None
    return decide(replace(limits, sequences=sequences), "BatchTimeAboveTarget", detail), memory


def _is_too_slow(
    view: BatchView, windows: Sequence[Window], mean_s: float, *, at_target: bool
) -> bool:
    """Return whether steps are too long.

    Below the model's target, smaller steps cost so much throughput that only the objective itself counts,
    and not while queue wait is near its own.
    """
    if at_target and wait_is_near(view.signals, view.settings):
        return False
    mark = view.settings.attainment_ratio if at_target else None
    too_long = mean_s > view.settings.batch_time_objective_s
    return too_long or is_slow(windows, view.settings, mark)


def _fewer_sequences(view: BatchView, limits: Limits) -> int:
    """Return the next lower limit of sequences; a quiet engine keeps its own."""
    if not batch_time_is_near(view.signals, view.settings):
        return limits.sequences
    running = math.ceil(running_per_pod(view.signals))
    factor = DOWN_FACTOR if view.targets else CUT_FACTOR
    least = running if view.pending else 1
    return max(least, math.floor(factor * min(limits.sequences, max(running, 1))))


def _mean_step_s(signals: Signals, since: float) -> float:
    """Return the mean batch time of the last window that began after the last change; 0 if none did."""
    window = signals.windows[-1] if signals.windows else None
    if window is None or window.start < since or not window.steps:
        return 0.0
    return window.seconds / window.steps


def _fewer_tokens(view: BatchView, limits: Limits, mean_s: float) -> int:
    """Return the next lower limit of tokens.

    The model's T* if it is known, because a notch less may only cut a prompt into more steps that are too
    long; without it, in proportion to the mean step if that is above the objective.
    """
    settings, targets = view.settings, view.targets
    fewer = moved_notch(limits.tokens, -1, settings)
    if targets is not None and targets.tokens is not None and not view.model_missed:
        return min(fewer, max(targets.tokens, settings.min_tokens))
    over = mean_s / settings.batch_time_objective_s
    return min(fewer, notch_down(limits.tokens / over, settings)) if over > 1.0 else fewer
