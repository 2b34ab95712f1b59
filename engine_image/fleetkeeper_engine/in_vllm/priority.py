"""The one number by which vLLM orders requests, fixed when a request is released into it. Pure.

vLLM schedules the smallest `priority` first and preempts the largest. The number travels in the
request's body through vLLM's own validation into its EngineCore, so it also carries, without any
change inside vLLM, what our scheduler wants to know: tier and arrival. Its bits, from the top:

    band | arrival + offset, microseconds of CLOCK_MONOTONIC | turn (2) | tier (2) | spare (4)

The spare bits start full: vLLM counts the number down by one for each further turn of a tool call.
It fits vLLM's signed 64 bits for 2,000 years of uptime.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fleetkeeper_engine.shm.layout import TIERS, Tier

_SPARE = 15
_TIER_SHIFT = 4
_TURN_SHIFT = 6
_RANK_SHIFT = 8
_BAND = 1 << 61
_MICRO = 1_000_000


class Turn(IntEnum):
    """Why a request was released."""

    ORDINARY = 0
    FLOOR = 1
    """To give its tier the least it is owed: ahead of ordinary requests, behind realtime."""
    OVERDUE = 2
    """It waited longer than the ageing time and its tier holds nothing: with realtime."""


_TURNS = tuple(Turn)


class Origin(NamedTuple):
    """What a number says about its request."""

    tier: Tier
    turn: Turn
    arrival_us: int


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How late a tier's arrivals count, in microseconds: batch by its ageing time."""

    standard_offset_us: int
    batch_ageing_us: int

    def offset_us(self, tier: Tier, turn: Turn = Turn.ORDINARY) -> int:
        """What is added to an arrival; nothing where the band already decides."""
        if tier is Tier.REALTIME or turn is not Turn.ORDINARY:
            return 0
        batch = self.batch_ageing_us if tier is Tier.BATCH else 0
        return self.standard_offset_us + batch

    def rank_us(self, tier: Tier, arrival_us: int) -> int:
        """The order of ordinary requests of the tiers below realtime."""
        return arrival_us + self.offset_us(tier)

    def number(self, tier: Tier, arrival_us: int, turn: Turn = Turn.ORDINARY) -> int:
        """The priority of a request."""
        rank = arrival_us + self.offset_us(tier, turn)
        low = turn << _TURN_SHIFT | tier << _TIER_SHIFT | _SPARE
        return (rank << _RANK_SHIFT | low) - _BAND * _band(tier, turn)

    def origin(self, number: int) -> Origin | None:
        """What `number` was made from; None when it is not one of ours (0: the supervisor's own)."""
        band = -(number // _BAND)
        low = number & 0xFF
        rank = (number + _BAND * band) >> _RANK_SHIFT
        tier_at, turn_at = low >> _TIER_SHIFT & 3, low >> _TURN_SHIFT & 3
        if rank <= 0 or tier_at >= len(TIERS) or turn_at >= len(_TURNS):
            return None
        tier, turn = TIERS[tier_at], _TURNS[turn_at]
        if band != _band(tier, turn):
            return None
        return Origin(tier, turn, rank - self.offset_us(tier, turn))


def _band(tier: Tier, turn: Turn) -> int:
    if turn is Turn.OVERDUE or tier is Tier.REALTIME:
        return 2
    return 1 if turn is Turn.FLOOR else 0


def request_of(number: int) -> int:
    """The same for all sequences and turns of one request, and for no two requests."""
    return number >> _RANK_SHIFT


def microseconds(seconds: float) -> int:
    """Whole microseconds."""
    return int(seconds * _MICRO)


def is_realtime(number: int) -> bool:
    """Whether a number is of a request of the realtime tier."""
    return number < -_BAND and number >> _TIER_SHIFT & 3 == Tier.REALTIME


def goes_first(number: int) -> bool:
    """Whether a number lies in the first band: realtime, or overdue."""
    return number < -_BAND
