"""Sums of products from which the operator fits the step time model.

The model is `batch_time = t0 + max(w, g (P + B)) + b B + c KV`, with P prefill tokens and B
sequences in the step and KV tokens resident in the cache. A least-squares fit over a window needs
no single steps, only the window's sums of products of (1, P, B, KV, time). The sums are kept apart
for decode-only and for prefill-bearing steps: b and c are learned from the former, g from the
latter.
"""

from __future__ import annotations

from enum import IntEnum

TERMS = (
    "steps",
    "prefill",
    "sequences",
    "kv",
    "seconds",
    "prefill_prefill",
    "prefill_sequences",
    "prefill_kv",
    "prefill_seconds",
    "sequences_sequences",
    "sequences_kv",
    "sequences_seconds",
    "kv_kv",
    "kv_seconds",
    "seconds_seconds",
)
"""Names of the sums, in the order of shared memory: counter `fleetkeeper_step_model_<term>_total`.

`prefill` is P in tokens, `sequences` is B, `kv` is KV in tokens, `seconds` is the batch time. `a_b`
is the sum of the products a*b.
"""


class StepClass(IntEnum):
    """A step with or without prefill tokens; the label `step_class` of the counters."""

    DECODE = 0
    PREFILL = 1

    @property
    def label(self) -> str:
        """Return the label's value."""
        return self.name.lower()


def products(prefill: float, sequences: float, kv: float, seconds: float) -> tuple[float, ...]:
    """Return what one step adds to each of `TERMS`."""
    return (
        1.0,
        prefill,
        sequences,
        kv,
        seconds,
        prefill * prefill,
        prefill * sequences,
        prefill * kv,
        prefill * seconds,
        sequences * sequences,
        sequences * kv,
        sequences * seconds,
        kv * kv,
        kv * seconds,
        seconds * seconds,
    )
