"""The step-time model: the batch time of a step as a function of its content.

    batch_time = t0 + max(w, g (P + B)) + b B + c KV + p [P > 0]

P: prefill tokens, B: sequences in the step, KV: resident KV tokens. Below the knee (g (P + B) < w)
reading the weights hides the cost of tokens. A step with prefill takes p more. So g and p are learned
from steps with prefill, and b and c from decode-only steps, whose intercept is t0 + w. Internally,
milliseconds and scaled features (hundreds of sequences, hundreds of thousands of KV tokens, thousands
of tokens) keep the numbers near one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper.autoscale.capacity.least_squares import Fit, Matrix, Vector, unknown_fit, updated
from fleetkeeper.autoscale.constants import (
    MODEL_ERROR_RATIO,
    MODEL_OFF_RATIO,
    MODEL_STEPS,
    MODEL_WINDOWS,
)
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper_contract.step_terms import StepSums

SEQUENCES = 100.0
KV = 1e5
TOKENS = 1e3
MS = 1e3
UNKNOWN_DECODE = unknown_fit(3)
UNKNOWN_PREFILL = unknown_fit(2)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients in seconds: `t0_s`, `w_s`, `g_s` per token, `b_s` per sequence, `c_s` per KV token."""

    t0_s: float
    w_s: float
    g_s: float
    b_s: float
    c_s: float
    p_s: float = 0.0
    """Time of a step with prefill beyond its tokens, such as the work to start a request."""

    def batch_time_s(self, prefill_tokens: float, sequences: float, kv_tokens: float) -> float:
        """Return the modeled time of one step.

        Example: t0 6 ms, w 10 ms, g 0.06 ms per token; 64 sequences without prefill are below the
        knee: 6 + max(10, 3.8) = 16 ms; with 512 prefill tokens 6 + 34.6 = 40.6 ms.
        """
        return (
            self.t0_s
            + max(self.w_s, self.g_s * (prefill_tokens + sequences))
            + self.b_s * sequences
            + self.c_s * kv_tokens
            + (self.p_s if prefill_tokens > 0 else 0.0)
        )


@dataclass(frozen=True, slots=True)
class StepModel:
    """The two fits of the model and their recent accuracy."""

    decode: Fit = UNKNOWN_DECODE
    """Fit of (t0 + w, b, c)."""
    prefill: Fit = UNKNOWN_PREFILL
    """Fit of (t0, g)."""
    off_windows: int = 0
    """Consecutive windows in which a proven model was off by more than half."""
    right_windows: int = 0
    """Consecutive windows in which the model was right, up to the number that proves it. A proven
    model stays proven."""
    missed: bool = False
    """True if the model was wrong in the last window."""

    @property
    def is_proven(self) -> bool:
        """Return whether it was right for long enough: an engine's first steps (warm-up) mislead it."""
        return self.right_windows >= MODEL_WINDOWS

    @property
    def is_doubted(self) -> bool:
        """Return whether it must not be used: it is wrong now and was never proven."""
        return self.missed and not self.is_proven

    @property
    def knows_decode(self) -> bool:
        """Return whether enough decode-only steps were seen."""
        return self.decode.steps >= MODEL_STEPS

    @property
    def knows_prefill(self) -> bool:
        """Return whether enough steps with prefill were seen (the fit needs the decode fit)."""
        return self.knows_decode and self.prefill.steps >= MODEL_STEPS

    @property
    def step_time(self) -> StepTime:
        """The coefficients in seconds; the knee w is the cost of decode-only steps above t0."""
        base, b, c = self.decode.coefficients
        t0, g = self.prefill.coefficients if self.knows_prefill else (base, 0.0)
        more, t0 = max(0.0, t0 - base), min(t0, base)
        return StepTime(
            t0 / MS, (base - t0) / MS, g / MS / TOKENS, b / MS / SEQUENCES, c / MS / KV, more / MS
        )

    def is_certain_at(self, sequences: float, kv_tokens: float) -> bool:
        """Return whether the standard error of a prediction there is at most a fifth of the prediction."""
        if not self.knows_decode:
            return False
        features = (1.0, sequences / SEQUENCES, kv_tokens / KV)
        expected = self.decode.predict(features)
        error = self.decode.variance(features) ** 0.5
        return expected > 0.0 and error <= MODEL_ERROR_RATIO * expected


def learned(model: StepModel, window: Window) -> StepModel:
    """Return the model after the steps of one window."""
    missed: list[tuple[float, float]] = []
    if window.decode.steps >= 1:
        decode, relative = _learn_decode(model.decode, window.decode)
        if model.knows_decode:
            missed.append((window.decode.steps, relative))
        model = replace(model, decode=decode)
    if window.prefill.steps >= 1 and model.knows_decode:
        prefill, relative = _learn_prefill(model, window.prefill)
        if model.knows_prefill:
            missed.append((window.prefill.steps, relative))
        model = replace(model, prefill=prefill)
    if missed:
        steps = sum(n for n, _ in missed)
        off = sum(n * relative for n, relative in missed) / steps > MODEL_OFF_RATIO
        model = _fared(model, off=off)
    return model


def _fared(model: StepModel, *, off: bool) -> StepModel:
    """Return the model after one more window in which it was right or `off`."""
    if not off:
        right = min(MODEL_WINDOWS, model.right_windows + 1)
        return replace(model, off_windows=0, right_windows=right, missed=False)
    if model.is_proven:
        return replace(model, off_windows=model.off_windows + 1, missed=True)
    return replace(model, right_windows=0, missed=True)


def _learn_decode(fit: Fit, sums: StepSums) -> tuple[Fit, float]:
    n, b, k = sums.steps, sums.sequences / SEQUENCES, sums.kv / KV
    bk = sums.sequences_kv / SEQUENCES / KV
    sxx: Matrix = (
        (n, b, k),
        (b, sums.sequences_sequences / SEQUENCES**2, bk),
        (k, bk, sums.kv_kv / KV**2),
    )
    sxy: Vector = (
        sums.seconds * MS,
        sums.sequences_seconds * MS / SEQUENCES,
        sums.kv_seconds * MS / KV,
    )
    return updated(fit, n, sxx, sxy, sums.seconds_seconds * MS**2)


def _learn_prefill(model: StepModel, sums: StepSums) -> tuple[Fit, float]:
    """Fit (t0, g) to the times of steps with prefill after subtracting b B + c KV."""
    _, b, c = model.decode.coefficients
    b, c = b / SEQUENCES, c / KV  # milliseconds per sequence and per KV token
    rest = sums.seconds * MS - b * sums.sequences - c * sums.kv
    tokens = sums.prefill + sums.sequences
    tokens_tokens = sums.prefill_prefill + 2 * sums.prefill_sequences + sums.sequences_sequences
    rest_tokens = (
        (sums.prefill_seconds + sums.sequences_seconds) * MS
        - b * (sums.prefill_sequences + sums.sequences_sequences)
        - c * (sums.prefill_kv + sums.sequences_kv)
    )
    rest_rest = (
        sums.seconds_seconds * MS**2
        - 2 * MS * (b * sums.sequences_seconds + c * sums.kv_seconds)
        + b * b * sums.sequences_sequences
        + 2 * b * c * sums.sequences_kv
        + c * c * sums.kv_kv
    )
    scaled = tokens / TOKENS
    sxx: Matrix = ((sums.steps, scaled), (scaled, tokens_tokens / TOKENS**2))
    return updated(model.prefill, sums.steps, sxx, (rest, rest_tokens / TOKENS), rest_rest)
