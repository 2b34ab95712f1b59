"""Feed-forward targets from the step-time model: tokens per step, capacity, bound on sequences.

T* = (0.9 objective - t0 - b B - c KV) / g    all tokens of a step, rounded down to a notch
C* = most sequences whose modeled batch time stays within 0.9 of the objective, KV below 0.9
M* = min(start-up, 0.85 KV capacity / (I + O/2 + 1.3 sd), 1.15 C*)

I, O: mean prompt and generated tokens per request. sd: standard deviation of a sequence's KV tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from fleetkeeper.autoscale.capacity.step_time_model import StepModel, StepTime
from fleetkeeper.autoscale.constants import (
    KV_CAPACITY_RATIO,
    KV_CV,
    KV_SEQUENCES_RATIO,
    KV_SPREAD,
    OBJECTIVE_RATIO,
    SEQUENCES_OVER_CAPACITY,
    TOKEN_NOTCHES,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings


@dataclass(frozen=True, slots=True)
class Targets:
    """T* (None: no prefill model), C* and M* in sequences, and the service time at C* in seconds."""

    tokens: int | None
    capacity: float
    sequences: int
    service_s: float


def notches(settings: ControlSettings) -> tuple[int, ...]:
    """Return the allowed values of tokens per step: the notches within the bounds, and the bounds."""
    low, high = settings.min_tokens, settings.max_tokens
    inside = [notch for notch in TOKEN_NOTCHES if low < notch < high]
    return (low, *inside, high) if high > low else (high,)


def notch_down(tokens: float, settings: ControlSettings) -> int:
    """Return the largest allowed value not above `tokens` (the floor if all are above)."""
    allowed = notches(settings)
    return allowed[max(0, bisect_right(allowed, tokens) - 1)]


def moved_notch(tokens: int, by: int, settings: ControlSettings) -> int:
    """Return the value `by` notches from `tokens`, within the bounds."""
    allowed = notches(settings)
    index = max(0, bisect_right(allowed, tokens) - 1)
    return allowed[min(len(allowed) - 1, max(0, index + by))]


def _mean_step_s(model: StepTime, n: float, prompt: float, generated: float) -> float:
    """Return the batch time of `n` sequences in balance: each adds prompt/generated prefill tokens per step."""
    prefill = n * prompt / max(1.0, generated)
    return model.batch_time_s(prefill, n, n * (prompt + generated / 2))


def capacity_of(
    model: StepTime, settings: ControlSettings, prompt: float, generated: float, kv_capacity: float
) -> float:
    """Return C* by bisection, as batch time grows with the sequences; 0 if even one is too many."""
    limit_s = OBJECTIVE_RATIO * settings.batch_time_objective_s
    if _mean_step_s(model, 1.0, prompt, generated) > limit_s:
        return 0.0
    high = float(settings.max_sequences)
    resident = prompt + generated / 2
    if kv_capacity > 0 and resident > 0:
        high = min(high, KV_CAPACITY_RATIO * kv_capacity / resident)
    high = max(1.0, high)
    if _mean_step_s(model, high, prompt, generated) <= limit_s:
        return high
    low = 1.0
    while high - low > 0.25:
        middle = (low + high) / 2
        if _mean_step_s(model, middle, prompt, generated) <= limit_s:
            low = middle
        else:
            high = middle
    return low


def kv_sequences(prompt: float, generated: float, kv_capacity: float) -> float:
    """Return the sequences that the KV cache holds in the worst minute; infinite if unknown."""
    resident = prompt + generated / 2
    if kv_capacity <= 0 or resident <= 0:
        return float("inf")
    return KV_SEQUENCES_RATIO * kv_capacity / (resident * (1 + KV_SPREAD * KV_CV))


def decide_targets(model: StepModel, signals: Signals, settings: ControlSettings) -> Targets | None:
    """Return the targets, or None while the model is doubted or too uncertain at them.

    None, too, if no batch is small enough: fewer sequences would cost throughput and shorten nothing,
    so the limits follow measurements.
    """
    prompt, generated = signals.prompt_tokens, signals.generation_tokens
    if not model.knows_decode or model.is_doubted or generated <= 0 or not signals.reporting_pods:
        return None
    time = model.step_time
    kv_capacity = signals.gauges.kv_capacity_tokens / signals.reporting_pods
    capacity = capacity_of(time, settings, prompt, generated, kv_capacity)
    if capacity < 1.0:
        return None
    resident = capacity * (prompt + generated / 2)
    if not model.is_certain_at(capacity, resident):
        return None
    sequences = min(
        float(settings.max_sequences),
        kv_sequences(prompt, generated, kv_capacity),
        SEQUENCES_OVER_CAPACITY * capacity,
    )
    tokens: int | None = None
    if model.knows_prefill and time.g_s > 0:
        room_s = (
            OBJECTIVE_RATIO * settings.batch_time_objective_s
            - time.t0_s
            - time.b_s * capacity
            - time.c_s * resident
        )
        tokens = notch_down(room_s / time.g_s, settings)
    return Targets(
        tokens=tokens,
        capacity=capacity,
        sequences=max(settings.min_sequences, int(sequences)),
        service_s=generated * _mean_step_s(time, capacity, prompt, generated),
    )
