"""The priority number by which vLLM orders requests, fixed when a request is released into vLLM. Pure.

vLLM schedules the smallest `priority` first and preempts the largest. The number travels in the
request's body through vLLM's own validation into its EngineCore. It therefore also carries tier and
arrival to our scheduler, without a change inside vLLM. Its bits, from the top:

    band | arrival + offset, microseconds of CLOCK_MONOTONIC | release reason (2) | tier (2) | spare (4)

The spare bits start full: vLLM decrements the number for each further round of a tool call. The
number fits vLLM's signed 64 bits for 2,000 years of uptime.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fleetkeeper_contract.tiers import TIERS, Tier

_SPARE = 15
_TIER_SHIFT = 4
_REASON_SHIFT = 6
_RANK_SHIFT = 8
_BAND = 1 << 61
_MICRO = 1_000_000


class ReleaseReason(IntEnum):
    """The reason for which a request was released."""

    ORDINARY = 0
    FLOOR = 1
    """Gives its tier the guaranteed minimum: ahead of ordinary requests, behind realtime."""
    OVERDUE = 2
    """It waited longer than the ageing time and its tier holds nothing: same band as realtime."""


_REASONS = tuple(ReleaseReason)


class Origin(NamedTuple):
    """The parts of a request that its priority encodes."""

    tier: Tier
    reason: ReleaseReason
    arrival_us: int


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """The delay that is added to a tier's arrivals, in microseconds: for batch its ageing time."""

    standard_offset_us: int
    batch_ageing_us: int

    def offset_us(self, tier: Tier, reason: ReleaseReason = ReleaseReason.ORDINARY) -> int:
        """Return the offset of an arrival; 0 where the band already decides."""
        if tier is Tier.REALTIME or reason is not ReleaseReason.ORDINARY:
            return 0
        batch = self.batch_ageing_us if tier is Tier.BATCH else 0
        return self.standard_offset_us + batch

    def rank_us(self, tier: Tier, arrival_us: int) -> int:
        """Return the rank of an ordinary request of a tier below realtime."""
        return arrival_us + self.offset_us(tier)

    def number(
        self, tier: Tier, arrival_us: int, reason: ReleaseReason = ReleaseReason.ORDINARY
    ) -> int:
        """Return the priority of a request."""
        rank = arrival_us + self.offset_us(tier, reason)
        low = reason << _REASON_SHIFT | tier << _TIER_SHIFT | _SPARE
        return (rank << _RANK_SHIFT | low) - _BAND * _band(tier, reason)

    def origin(self, number: int) -> Origin | None:
        """Decode a priority; None if Fleetkeeper did not encode it (0 is the supervisor's own)."""
        band = -(number // _BAND)
        low = number & 0xFF
        rank = (number + _BAND * band) >> _RANK_SHIFT
        tier_at, reason_at = low >> _TIER_SHIFT & 3, low >> _REASON_SHIFT & 3
        if rank <= 0 or tier_at >= len(TIERS) or reason_at >= len(_REASONS):
            return None
        tier, reason = TIERS[tier_at], _REASONS[reason_at]
        if band != _band(tier, reason):
            return None
        return Origin(tier, reason, rank - self.offset_us(tier, reason))


def _band(tier: Tier, reason: ReleaseReason) -> int:
    if reason is ReleaseReason.OVERDUE or tier is Tier.REALTIME:
        return 2
    return 1 if reason is ReleaseReason.FLOOR else 0


def request_of(number: int) -> int:
    """Return a number that all sequences and rounds of one request share, and no two requests."""
    return number >> _RANK_SHIFT


def microseconds(seconds: float) -> int:
    """Return whole microseconds."""
    return int(seconds * _MICRO)


def is_realtime(number: int) -> bool:
    """Return True if the priority encodes a realtime request."""
    return number < -_BAND and number >> _TIER_SHIFT & 3 == Tier.REALTIME


def goes_first(number: int) -> bool:
    """Return True if the priority lies in the first band: realtime or overdue."""
    return number < -_BAND
