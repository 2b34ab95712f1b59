"""Rules for the next request to leave the queue: a function of what waits, what runs, and the limits. Pure.

In falling order: a request that waited longer than the ageing time and whose tier holds nothing;
realtime; batch up to its floor; then standard and batch by arrival, where a batch arrival counts
`batch_ageing` later. The chosen request waits for room, and a smaller one behind it does not
overtake it. Every request is therefore released within a bound: the reserve and the shares only
hold back a tier that already holds something, or finishing requests of the whole pod make the room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from fleetkeeper_contract.tiers import TIERS, Tier
from fleetkeeper_engine.in_vllm.priority import PriorityRule, ReleaseReason
from fleetkeeper_engine.in_vllm.realtime_reserve import look_ahead_of, reserve_of

_LONG = 4


class QueueHead(Protocol):
    """The first request in a tier's queue."""

    @property
    def sequences(self) -> int:
        """Return the sequences that the engine will run for it."""

    @property
    def arrival_us(self) -> int:
        """Return its arrival in microseconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request as if it were the first of its queue."""

    sequences: int
    arrival_us: int


@dataclass(frozen=True)
class Room:
    """The capacity that admission may hand to vLLM. Shares are of the sequences; tuples are by tier."""

    sequences: int
    """The limit in force."""
    share_ratios: tuple[float, float, float] = (1.0, 1.0, 0.3)
    """The most that a tier may hold while another tier waits."""
    batch_floor_ratio: float = 0.05
    reserved: bool = False
    """Realtime requests arrive, so their reserve is kept."""
    realtime_peak: int = 0
    """Sequences that realtime waited for or held at its recent peak."""
    stopped: bool = False
    """Nothing may be released: memory is above its cap."""

    @cached_property
    def total(self) -> int:
        """Return the sequences that may be inside vLLM: the limit and a look-ahead that fills free slots."""
        return self.sequences + look_ahead_of(self.sequences)

    @cached_property
    def below_realtime(self) -> int:
        """Return the sequences of `total` that standard and batch may hold together."""
        return self.total - (reserve_of(self.sequences, self.realtime_peak) if self.reserved else 0)

    @cached_property
    def batch_floor(self) -> int:
        """Return the sequences that batch may always hold."""
        if self.batch_floor_ratio <= 0.0:
            return 0
        return max(1, math.floor(self.batch_floor_ratio * self.sequences))

    def share(self, tier: Tier) -> int:
        """Return the sequences that a tier may hold while others wait: at least one, and at least its floor."""
        if self.share_ratios[tier] >= 1.0:
            return self.total
        least = self.batch_floor if tier is Tier.BATCH else 1
        return max(1, least, math.floor(self.share_ratios[tier] * self.sequences))

    def charge(self, tier: Tier, sequences: int) -> int:
        """Return the sequences that a request is charged: at most what its tier may ever hold.

        Without this bound, a limit that was lowered after the request arrived would make it and
        everything behind it wait until nothing else is held. vLLM runs the sequences above the
        charge as slots become free.
        """
        if sequences == 1:
            return 1
        most = self.share(tier)
        if self.reserved and tier is not Tier.REALTIME:
            most = min(most, self.below_realtime)
        return min(sequences, max(1, most))


Heads = Sequence[QueueHead | None]


def decide_next(
    heads: Heads,
    held: Sequence[int],
    room: Room,
    rule: PriorityRule,
    now_us: int,
    *,
    floor_held: int | None = None,
) -> tuple[Tier, ReleaseReason] | None:
    """Return the tier whose first request is released now, and the reason; None if nothing may be.

    Args:
        heads: the first waiting request of each tier.
        held: sequences released and not finished, by tier.
        room: limits in force.
        rule: order of ordinary requests. Its ageing time is also when a request is overdue.
        now_us: microseconds of CLOCK_MONOTONIC.
        floor_held: the sequences of batch that were released ahead of ordinary ones. An ordinary
            one may wait in vLLM's queue behind all others until it has aged, so it does not count
            towards the floor. None means all that batch holds.
    """
    if room.stopped:
        return None
    overdue = _overdue(heads, held, rule, now_us)
    if overdue is not None:
        long_ago_us = now_us - _LONG * rule.batch_ageing_us
        return _release_overdue(overdue, heads, held, room, long_ago_us=long_ago_us)
    choice = _choice(
        heads, held, room, rule, held[Tier.BATCH] if floor_held is None else floor_held
    )
    if choice is None:
        return None
    head = heads[choice[0]]
    return choice if head is not None and _fits(*choice, head.sequences, held, room) else None


def fits_alone(tier: Tier, sequences: int, held: Sequence[int], room: Room) -> bool:
    """Return whether a request that has just arrived is released at once, when nothing else waits.

    This is `decide_next` without its rules between waiting requests.
    """
    return not room.stopped and _fits(tier, ReleaseReason.ORDINARY, sequences, held, room)


def _release_overdue(
    first: tuple[Tier, QueueHead],
    heads: Heads,
    held: Sequence[int],
    room: Room,
    *,
    long_ago_us: int,
) -> tuple[Tier, ReleaseReason] | None:
    """Return the overdue request if there is room for it. Until then, only realtime passes it.

    A request of many sequences needs as many to end first. After four times the ageing time nothing
    passes it, so a flood of realtime requests cannot block it for ever.
    """
    tier, head = first
    if _fits(tier, ReleaseReason.OVERDUE, head.sequences, held, room):
        return tier, ReleaseReason.OVERDUE
    realtime = heads[Tier.REALTIME]
    if tier is Tier.REALTIME or realtime is None or head.arrival_us < long_ago_us:
        return None
    fits = _within_share(Tier.REALTIME, heads, held, room) and _fits(
        Tier.REALTIME, ReleaseReason.ORDINARY, realtime.sequences, held, room
    )
    return (Tier.REALTIME, ReleaseReason.ORDINARY) if fits else None


def _choice(
    heads: Heads, held: Sequence[int], room: Room, rule: PriorityRule, floor_held: int
) -> tuple[Tier, ReleaseReason] | None:
    if heads[Tier.REALTIME] is not None and _within_share(Tier.REALTIME, heads, held, room):
        return Tier.REALTIME, ReleaseReason.ORDINARY
    batch = heads[Tier.BATCH]
    if (
        batch is not None
        and _others_wait(Tier.BATCH, heads)
        and _fits_into(room.batch_floor, floor_held, room.charge(Tier.BATCH, batch.sequences))
    ):
        return Tier.BATCH, ReleaseReason.FLOOR
    ranked = [
        (rule.rank_us(tier, head.arrival_us), tier)
        for tier in (Tier.STANDARD, Tier.BATCH)
        if (head := heads[tier]) is not None and _within_share(tier, heads, held, room)
    ]
    return (min(ranked)[1], ReleaseReason.ORDINARY) if ranked else None


def _overdue(
    heads: Heads, held: Sequence[int], rule: PriorityRule, now_us: int
) -> tuple[Tier, QueueHead] | None:
    found: tuple[Tier, QueueHead] | None = None
    before_us = now_us - rule.batch_ageing_us
    for tier in TIERS:
        head = heads[tier]
        if head is not None and held[tier] == 0 and head.arrival_us < before_us:
            found, before_us = (tier, head), head.arrival_us
    return found


def _others_wait(tier: Tier, heads: Heads) -> bool:
    return len(heads) - heads.count(None) > (heads[tier] is not None)


def _within_share(tier: Tier, heads: Heads, held: Sequence[int], room: Room) -> bool:
    head = heads[tier]
    if head is None or not _others_wait(tier, heads):
        return head is not None
    return _fits_into(room.share(tier), held[tier], room.charge(tier, head.sequences))


def _fits(
    tier: Tier, reason: ReleaseReason, sequences: int, held: Sequence[int], room: Room
) -> bool:
    sequences = room.charge(tier, sequences)
    if not _fits_into(room.total, sum(held), sequences):
        return False
    if tier is Tier.REALTIME or reason is ReleaseReason.OVERDUE or not room.reserved:
        return True
    return _fits_into(room.below_realtime, held[Tier.STANDARD] + held[Tier.BATCH], sequences)


def _fits_into(limit: int, held: int, sequences: int) -> bool:
    """Return whether the sum is within the limit. A larger request fits if nothing else is held."""
    return limit > 0 and (held == 0 or held + sequences <= limit)


class DrainRate(NamedTuple):
    """Requests finished per second, with an exponential memory of 10 s.

    Immutable: `after` returns the next state.
    """

    per_second: float = 0.0
    at: float = 0.0

    def after(self, finished: int, now: float) -> DrainRate:
        """Return the rate after `finished` more requests ended at `now`."""
        return DrainRate(self.at_time(now) + finished / _RATE_MEMORY_S, now)

    def at_time(self, now: float) -> float:
        """Return the rate at `now` without further ends."""
        return self.per_second * math.exp(-max(0.0, now - self.at) / _RATE_MEMORY_S)

    def retry_after_s(self, ahead: int, now: float) -> int:
        """Return when a place in a queue of `ahead` requests is likely free: 1 to 60 whole seconds.

        The estimate is for half the queue to drain, so that clients that got the same answer do not
        return to a full queue.
        """
        rate = self.at_time(now)
        if rate <= 1e-3:
            return _UNKNOWN_RETRY_S
        return min(60, max(1, math.ceil(0.5 * ahead / rate)))


_RATE_MEMORY_S = 10.0
_UNKNOWN_RETRY_S = 5
