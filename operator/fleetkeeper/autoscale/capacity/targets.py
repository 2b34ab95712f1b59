"""Feed-forward targets from the step-time model: tokens per step, capacity, bound on sequences.

T* = (0.9 objective - t0 - b B - c KV) / g    all tokens of a step, rounded down to a notch
C* = most sequences whose modeled batch time stays within 0.9 of the objective, KV below 0.9
M* = min(start-up, 0.85 KV capacity / (I + O/2 + 1.3 sd), most whose full step is within the objective)

I, O: mean prompt and generated tokens per request. sd: standard deviation of a sequence's KV tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from fleetkeeper.autoscale.capacity.step_time_model import StepModel, StepTime
from fleetkeeper.autoscale.constants import (
    KV_CAPACITY_RATIO,
    KV_CV,
    KV_SEQUENCES_RATIO,
    KV_SPREAD,
    OBJECTIVE_RATIO,
    PREFILL_WAIT,
    PREFILL_WAIT_MAX,
    TOKEN_NOTCHES,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings


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


def notches_between(before: int, after: int, settings: ControlSettings) -> int:
    """Return how many notches `after` lies above `before`; negative below.

    Example: from 384 to 256 tokens it is one notch down, from 256 to 8192 eleven up.
    """
    allowed = notches(settings)
    return bisect_right(allowed, after) - bisect_right(allowed, before)


@dataclass(frozen=True, slots=True)
class Shape:
    """The mean tokens of a request, and the tokens that a step may have."""

    prompt: float
    generated: float
    step_tokens: float

    @property
    def resident(self) -> float:
        """The KV tokens of a running sequence, on average."""
        return self.prompt + self.generated / 2


def mean_step_s(model: StepTime, n: float, shape: Shape) -> float:
    """Return the mean batch time of `n` sequences in balance.

    Per step, n / generated requests start. Their prompts come in chunks of up to the step's tokens, in a
    share p of the steps, and only these steps are long: an average of the tokens over all steps would
    hide most of the prefill below the knee of the model.

    Example: 70B on four H100, 2 sequences of code completion (2,050 + 28 tokens): 7% of the steps
    contain a prompt and take 132 ms, the others 16 ms, so the mean is 24 ms.
    """
    prefill = n * shape.prompt / max(1.0, shape.generated)
    chunk = max(1.0, prefill, min(shape.prompt, shape.step_tokens - n))
    share = min(1.0, prefill / chunk)
    kv = n * shape.resident
    without = model.batch_time_s(0.0, n, kv)
    return without + share * (model.batch_time_s(chunk, n, kv) - without)


@dataclass(frozen=True, slots=True)
class Targets:
    """T* (None: no prefill model), C* and M* in sequences, and the model that they follow from."""

    tokens: int | None
    capacity: float
    sequences: int
    prompt_capacity: float
    """Sequences in balance up to which prompts are computed without a long wait."""
    time: StepTime
    shape: Shape

    @property
    def carried_per_s(self) -> float:
        """The requests/s that a replica carries within both objectives.

        Sequences in balance divided by the time of a request (Little's law), at the smaller capacity.
        """
        sequences = min(self.capacity, self.prompt_capacity)
        return sequences / self.service_s(sequences)

    @property
    def batch_tokens_per_s(self) -> float:
        """The tokens/s, prompt and generated, of a replica at its limits within the batch time objective.

        How long prompts wait for one another does not count: tier batch may wait.
        """
        sequences = max(1.0, min(self.capacity, float(self.sequences)))
        return (self.shape.prompt + self.shape.generated) * sequences / self.service_s(sequences)

    def service_s(self, sequences: float) -> float:
        """Return the time of a request in a batch of so many sequences, seconds."""
        return self.shape.generated * mean_step_s(self.time, sequences, self.shape)


def prefill_wait_s(model: StepTime, n: float, shape: Shape) -> float:
    """Return the mean time that a prompt waits for others, with `n` sequences in balance.

    Prompts share the tokens that the sequences leave of each step: a queue whose service
    time is that of the full steps that a prompt takes, assumed exponential (M/M/1). Infinite if they are too many.
    """
    room = shape.step_tokens - n
    if room <= 0:
        return float("inf")
    full_s = model.batch_time_s(room, n, n * shape.resident)
    took_s = shape.prompt / room * full_s
    arrivals_per_s = n / (max(1.0, shape.generated) * mean_step_s(model, n, shape))
    busy = arrivals_per_s * took_s
    if busy >= 1.0:
        return float("inf")
    return busy / (1.0 - busy) * took_s


def capacity_of(
    model: StepTime, settings: ControlSettings, shape: Shape, kv_capacity: float
) -> float:
    """Return C* by bisection, as batch time grows with the sequences; 0 if even one is too many.

    The KV cache and the tokens of a step bound it, too.
    """
    limit_s = OBJECTIVE_RATIO * settings.batch_time_objective_s
    if mean_step_s(model, 1.0, shape) > limit_s:
        return 0.0
    high = float(settings.max_sequences)
    if kv_capacity > 0 and shape.resident > 0:
        high = min(high, KV_CAPACITY_RATIO * kv_capacity / shape.resident)
    return _most(lambda n: mean_step_s(model, n, shape) <= limit_s, high)


def promptly_served(model: StepTime, settings: ControlSettings, shape: Shape) -> float:
    """Return the most sequences in balance whose prompts do not wait for one another for too long."""
    limit_s = prefill_wait_ratio(settings.attainment_ratio) * settings.queue_wait_objective_s
    high = float(settings.max_sequences)
    return _most(lambda n: prefill_wait_s(model, n, shape) <= limit_s, high)


def prefill_wait_ratio(attainment_ratio: float) -> float:
    """Return the mean prefill wait at a replica's capacity, as a ratio of the queue wait objective.

    Example: 0.76 for an attainment of 95%, 0.98 for 90%, 0.54 for 99%. For 50% it is the bound, 2.
    """
    quantile = NormalDist().inv_cdf(attainment_ratio)
    return PREFILL_WAIT / max(quantile, PREFILL_WAIT / PREFILL_WAIT_MAX)


def _most(fits: Callable[[float], bool], high: float) -> float:
    """Return the largest number from 1 to `high` that fits, within 0.25; 1 if none does."""
    low, high = 1.0, max(1.0, high)
    if fits(high):
        return high
    while high - low > 0.25:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def kv_sequences(prompt: float, generated: float, kv_capacity: float) -> float:
    """Return the sequences that the KV cache holds in the worst minute; infinite if unknown."""
    resident = prompt + generated / 2
    if kv_capacity <= 0 or resident <= 0:
        return float("inf")
    return KV_SEQUENCES_RATIO * kv_capacity / (resident * (1 + KV_SPREAD * KV_CV))


def most_sequences(
    model: StepTime, settings: ControlSettings, shape: Shape, step_tokens: float
) -> float:
    """Return the sequences with which a full step takes as long as the objective allows.

    A full step has `step_tokens`. They bound the time of a prefill, so the sequences bound only that of
    their own: b and the KV tokens.
    """
    full_s = model.batch_time_s(step_tokens, 0.0, 0.0)
    each_s = model.b_s + model.c_s * shape.resident
    room_s = settings.batch_time_objective_s - full_s
    within_tokens = room_s / each_s if each_s > 0 else float("inf")
    if model.g_s <= 0 or within_tokens <= step_tokens:
        return within_tokens
    # More sequences than tokens: each costs a token of the step, too.
    return step_tokens + (room_s - step_tokens * each_s) / (model.g_s + each_s)


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
    shape = Shape(prompt, generated, float(settings.max_tokens))
    capacity = capacity_of(time, settings, shape, kv_capacity)
    if capacity < 1.0:
        return None
    resident = capacity * (prompt + generated / 2)
    if not model.is_certain_at(capacity, resident):
        return None
    tokens: int | None = None
    if model.knows_prefill and time.g_s > 0:
        room_s = (
            OBJECTIVE_RATIO * settings.batch_time_objective_s
            - time.t0_s
            - time.p_s
            - time.b_s * capacity
            - time.c_s * resident
        )
        tokens = notch_down(room_s / time.g_s, settings)
        shape = replace(shape, step_tokens=float(tokens))
        capacity = max(1.0, capacity_of(time, settings, shape, kv_capacity))
    sequences = min(
        float(settings.max_sequences),
        kv_sequences(prompt, generated, kv_capacity),
        most_sequences(time, settings, shape, tokens or 0),
    )
    return Targets(
        tokens=tokens,
        capacity=capacity,
        sequences=max(settings.min_sequences, int(sequences)),
        prompt_capacity=promptly_served(time, settings, shape),
        time=time,
        shape=shape,
    )
