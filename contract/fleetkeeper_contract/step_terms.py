"""Sums of products from which the operator fits the step-time model, as the engine exports them.

The model is `batch_time = t0 + max(w, g (P + B)) + b B + c KV`, with P prefill tokens and B
sequences in the step and KV tokens resident in the cache. A least-squares fit over a window needs
no single steps, only the window's sums of products of (1, P, B, KV, time). The sums are kept apart
for decode-only and for prefill-bearing steps: b and c are learned from the former, g from the
latter.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class StepSums(NamedTuple):
    """Sums of products over the steps of one class. Field `a_b`: sum of the products of a and b."""

    steps: float = 0.0
    prefill: float = 0.0
    """Prefill tokens P of the steps."""
    sequences: float = 0.0
    """Sequences B in the steps."""
    kv: float = 0.0
    """Resident KV tokens."""
    seconds: float = 0.0
    """Batch time."""
    prefill_prefill: float = 0.0
    prefill_sequences: float = 0.0
    prefill_kv: float = 0.0
    prefill_seconds: float = 0.0
    sequences_sequences: float = 0.0
    sequences_kv: float = 0.0
    sequences_seconds: float = 0.0
    kv_kv: float = 0.0
    kv_seconds: float = 0.0
    seconds_seconds: float = 0.0


TERMS = StepSums._fields
"""Names of the sums, in the order of shared memory: counter `fleetkeeper_step_model_<term>_total`."""


class StepClass(IntEnum):
    """A step with or without prefill tokens; the label `step_class` of the counters."""

    DECODE = 0
    PREFILL = 1

    @property
    def label(self) -> str:
        """Return the label's value."""
        return self.name.lower()
