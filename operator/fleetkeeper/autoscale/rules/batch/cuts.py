"""Rules that protect: lower the limits for the KV cache, the memory cap and the batch time."""

from __future__ import annotations

import math
from dataclasses import replace

from fleetkeeper.autoscale.capacity.targets import moved_notch
from fleetkeeper.autoscale.constants import (
    CUT_FACTOR,
    DOWN_EVERY_S,
    DOWN_FACTOR,
    KV_CUT_FACTOR,
    KV_HIGH_RATIO,
    OVER_CAP_FACTOR,
    PREEMPTIONS_PER_S,
    UP_EVERY_S,
)
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, Step
from fleetkeeper.autoscale.rules.objectives import is_slow, judged_since, running_per_pod
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
    sequences = math.floor((1.0 if view.pending else KV_CUT_FACTOR) * running)
    if sequences < 1 or sequences >= limits.sequences:
        return None
    return decide(
        replace(limits, sequences=sequences),
        "KVCachePressure",
        f"KV cache is {signals.kv_ratio_max:.0%} full, with {signals.preemptions_per_pod_s:.2f} preemptions/s per pod",
    ), replace(memory, before_cut=max(limits.sequences, memory.before_cut or 0))


def relieve_cap(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Lower sequences if memory use is above the cap, at most every 30 s."""
    cap = view.settings.cap_percent / 100
    if view.signals.memory_used_ratio <= cap or now - memory.changed < UP_EVERY_S:
        return None
    running = running_per_pod(view.signals)
    sequences = math.floor(OVER_CAP_FACTOR * min(limits.sequences, max(running, 1.0)))
    if sequences >= limits.sequences or limits.sequences <= view.settings.min_sequences:
        return None
    return decide(
        replace(limits, sequences=sequences),
        "MemoryAboveCap",
        f"memory use is {view.signals.memory_used_ratio:.0%}, above the cap of {cap:.0%}",
    ), memory


def shorten(view: BatchView, memory: BatchMemory, limits: Limits, now: float) -> Step | None:
    """Go one notch down, tokens first, if batch time attainment is low in 2 of 3 windows."""
    windows = judged_since(view.signals.windows, memory.changed)
    if not is_slow(windows, view.settings) or now - memory.changed < DOWN_EVERY_S:
        return None
    attained = windows[-1].batch_attainment or 0.0
    objective_ms = view.settings.batch_time_objective_s * 1e3
    detail = f"{attained:.1%} of steps are within {objective_ms:.0f} ms"
    fewer = moved_notch(limits.tokens, -1, view.settings)
    if fewer < limits.tokens and view.signals.rates.prompt_tokens > 0:
        return decide(replace(limits, tokens=fewer), "BatchTimeAboveTarget", detail), memory
    factor = DOWN_FACTOR if view.targets else CUT_FACTOR
    least = math.ceil(running_per_pod(view.signals)) if view.pending else 1
    base = min(limits.sequences, max(math.ceil(running_per_pod(view.signals)), 1))
    sequences = max(least, math.floor(factor * base))
    if sequences >= limits.sequences:
        return None
    return decide(replace(limits, sequences=sequences), "BatchTimeAboveTarget", detail), memory
