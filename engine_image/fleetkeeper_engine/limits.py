"""Which batch limits are in force. Pure: the scheduler, the middleware and the supervisor all ask here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import SupervisorBlock

RETURN_S = 30.0
"""After the lease has ended, limits are back at their start-up values after so long."""
NOTCHES = 10
"""In so many steps, equal in ratio: a dead operator causes no cliff."""


@dataclass(frozen=True, slots=True)
class LimitRange:
    """What a limit may be. The ceiling is the start-up value: buffers are sized by it."""

    floor: int
    ceiling: int

    def clamp(self, wanted: int) -> int:
        """`wanted` within the range; 0 means nothing was wanted: the ceiling."""
        return self.ceiling if wanted <= 0 else min(max(wanted, self.floor), self.ceiling)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sequences and tokens of a step."""

    sequences: int
    tokens: int


def lease_holds(orders: SupervisorBlock | None, now: float) -> bool:
    """Whether there are orders and their lease has not ended."""
    return orders is not None and now < orders.lease_deadline


def limits_in_force(
    orders: SupervisorBlock | None, sequences: LimitRange, tokens: LimitRange, now: float
) -> Limits:
    """What was ordered while the lease holds; from there back to the ceiling in 10 notches over 30 s.

    >>> orders = SupervisorBlock(sequences=16, tokens=512, lease_deadline=100.0)
    >>> limits_in_force(orders, LimitRange(4, 64), LimitRange(256, 2048), now=115.0)
    Limits(sequences=32, tokens=1024)
    """
    if orders is None or orders.lease_deadline <= 0.0:
        return Limits(sequences.ceiling, tokens.ceiling)
    return Limits(
        _returned(
            sequences.clamp(orders.sequences), sequences.ceiling, now - orders.lease_deadline
        ),
        _returned(tokens.clamp(orders.tokens), tokens.ceiling, now - orders.lease_deadline),
    )


def limits_change_at(orders: SupervisorBlock | None, now: float) -> float:
    """Until when `limits_in_force` says the same for these orders: no step need work it out again before.

    >>> limits_change_at(SupervisorBlock(sequences=16, lease_deadline=100.0), now=40.0)
    100.0
    """
    if orders is None or orders.lease_deadline <= 0.0:
        return math.inf
    if now < orders.lease_deadline:
        return orders.lease_deadline
    return now if now < orders.lease_deadline + RETURN_S else math.inf


def _returned(wanted: int, ceiling: int, since_end_s: float) -> int:
    if since_end_s < 0.0:
        return wanted
    notch = min(NOTCHES, math.floor(since_end_s / RETURN_S * NOTCHES))
    if notch >= NOTCHES:
        return ceiling
    return min(ceiling, round(wanted * math.pow(ceiling / wanted, notch / NOTCHES)))
