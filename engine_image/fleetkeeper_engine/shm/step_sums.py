"""What one step adds to the sums of the step-time model."""

from __future__ import annotations


def products(prefill: float, sequences: float, kv: float, seconds: float) -> tuple[float, ...]:
    """Return what one step adds to each of `step_terms.TERMS`."""
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
