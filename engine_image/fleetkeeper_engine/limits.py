"""Batch limits in force. Pure; shared by the scheduler, the middleware and pid 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import SupervisorBlock

RETURN_S = 30.0
"""Limits are back at their start-up values this long after the lease has ended."""
NOTCHES = 10
"""Number of steps on the way back, equal in ratio, so that a dead operator causes no sudden change."""
PREFILL_QUANTUM_TOKENS = 256
"""Tokens that a step keeps for prefills, beyond one decode token for each running sequence."""


@dataclass(frozen=True, slots=True)
class LimitRange:
    """The range of a limit. The ceiling is the start-up value, by which buffers are sized."""

    floor: int
    ceiling: int

    def clamp(self, wanted: int) -> int:
        """Return `wanted` within the range. 0 means no request: the ceiling."""
        return self.ceiling if wanted <= 0 else min(max(wanted, self.floor), self.ceiling)


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum sequences and tokens of a step."""

    sequences: int
    tokens: int


def lease_holds(lease: SupervisorBlock | None, now: float) -> bool:
    """Return whether there is a limits lease that has not ended."""
    return lease is not None and now < lease.lease_deadline


def limits_in_force(
    lease: SupervisorBlock | None, sequences: LimitRange, tokens: LimitRange, now: float
) -> Limits:
    """Return the requested limits during the lease, then back to the ceiling in 10 steps over 30 s.

    >>> lease = SupervisorBlock(sequences=16, tokens=512, lease_deadline=100.0)
    >>> limits_in_force(lease, LimitRange(4, 64), LimitRange(256, 2048), now=115.0)
    Limits(sequences=32, tokens=1024)
    """
    if lease is None or lease.lease_deadline <= 0.0:
        return Limits(sequences.ceiling, tokens.ceiling)
    return Limits(
        _returned(sequences.clamp(lease.sequences), sequences.ceiling, now - lease.lease_deadline),
        _returned(tokens.clamp(lease.tokens), tokens.ceiling, now - lease.lease_deadline),
    )


def limits_change_at(lease: SupervisorBlock | None, now: float) -> float:
    """Return the time until which `limits_in_force` stays the same for this lease.

    No step needs to compute the limits again before that time.

    >>> limits_change_at(SupervisorBlock(sequences=16, lease_deadline=100.0), now=40.0)
    100.0
    """
    if lease is None or lease.lease_deadline <= 0.0:
        return math.inf
    if now < lease.lease_deadline:
        return lease.lease_deadline
    return now if now < lease.lease_deadline + RETURN_S else math.inf


def _returned(wanted: int, ceiling: int, since_end_s: float) -> int:
    if since_end_s < 0.0:
        return wanted
    notch = min(NOTCHES, math.floor(since_end_s / RETURN_S * NOTCHES))
    if notch >= NOTCHES:
        return ceiling
    return min(ceiling, round(wanted * math.pow(ceiling / wanted, notch / NOTCHES)))
