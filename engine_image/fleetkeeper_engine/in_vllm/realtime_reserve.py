"""Which sequences may run in the next step: the reserve for realtime, and tokens for progress. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RESERVE_KEPT_S = 10.0
"""The reserve for realtime is kept so long after the last realtime request; without any it would idle."""
PREFILL_QUANTUM_TOKENS = 256
"""Tokens that a step keeps for prefills beyond one decode token a running sequence."""


def progressing_tokens(
    wanted: int,
    ceiling: int,
    running: int,
    speculative_tokens: int = 0,
    quantum: int = PREFILL_QUANTUM_TOKENS,
) -> int:
    """The tokens a step needs so that every running sequence progresses, at least `wanted`.

    vLLM serves its running list from the front and does not rotate it: with fewer tokens than
    sequences the tail never decodes, and with no token to spare no prefill ever ends.
    """
    return min(ceiling, max(wanted, running * (1 + speculative_tokens) + quantum))


def reserve_of(sequences: int, realtime_peak: int = 0) -> int:
    """Sequences kept for realtime while its requests come: max(1, 5%) more than at its recent peak.

    At most half for its peak's sake, and never all. The peak and not the mean: places come free when
    sequences end, and those that started together end together. A fixed 5% leaves realtime behind
    them: simulated at twice the capacity with a fifth of it realtime, p95 of its wait was 6 steps at
    8 sequences and 8 at 64 of equal length; with its peak kept it is below 2.5 everywhere. More than
    the peak: else the first request above it waits for a sequence of another tier to end.
    """
    if sequences <= 1:
        return 0
    least = min(max(1, math.ceil(0.05 * sequences)), sequences - 1)
    return max(least, min(realtime_peak + least, sequences // 2)) if realtime_peak else least


@dataclass(frozen=True, slots=True)
class RecentPeak:
    """The highest of the values seen in the last 5 to 10 s. A value: `after` gives the next."""

    highest_now: int = 0
    highest_before: int = 0
    period: int = 0

    def after(self, value: int, now: float) -> RecentPeak:
        """The peak when `value` was seen at `now`."""
        period = math.floor(2.0 * now / RESERVE_KEPT_S)
        if period == self.period:
            return self if value <= self.highest_now else replace(self, highest_now=value)
        return RecentPeak(value, self.highest_now if period == self.period + 1 else 0, period)

    @property
    def value(self) -> int:
        """The peak."""
        return max(self.highest_now, self.highest_before)


def look_ahead_of(sequences: int) -> int:
    """Sequences released into vLLM beyond the limit, so that no slot idles: max(2, 5%)."""
    return max(2, math.ceil(0.05 * sequences))


def active_sequences(
    limit: int,
    running: int,
    realtime_waiting: int,
    *,
    reserved: bool,
    realtime_running: int = 0,
    realtime_peak: int = 0,
) -> int:
    """The most sequences that may run in the next step.

    With the reserve kept, others fill up to the limit less the reserve, and to the limit less what
    realtime took at its recent peak; beyond it exactly as many more are let in as realtime sequences
    wait, which vLLM's heap hands out first.

    >>> active_sequences(20, running=19, realtime_waiting=0, reserved=True)
    19
    >>> active_sequences(20, running=19, realtime_waiting=3, reserved=True)
    20
    >>> active_sequences(20, running=16, realtime_waiting=0, reserved=True, realtime_peak=5)
    16
    """
    if not reserved:
        return limit
    others = running - realtime_running
    room = min(
        limit - reserve_of(limit) - running,
        limit - reserve_of(limit, realtime_peak) - others,
    )
    return min(limit, running + realtime_waiting + max(0, room))
