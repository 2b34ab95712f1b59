"""Who leaves the queue next, by room, share, floor, reserve and age; how quickly places come free."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.rules import (
    Candidate,
    DrainRate,
    QueueHead,
    Room,
    decide_next,
    fits_alone,
)
from fleetkeeper_engine.in_vllm.priority import PriorityRule, ReleaseReason
from fleetkeeper_engine.in_vllm.realtime_reserve import reserve_of
from tests.support.lanes import examples

RULE = PriorityRule(standard_offset_us=0, batch_ageing_us=30_000_000)
SECOND = 1_000_000


def head(arrival_s: float, sequences: int = 1) -> Candidate:
    return Candidate(sequences, int(arrival_s * SECOND))


@pytest.mark.parametrize(
    ("heads", "held_by", "expected"),
    [
        ((None, None, None), (0, 0, 0), None),
        ((head(9), head(1), head(1)), (0, 1, 1), (Tier.REALTIME, ReleaseReason.ORDINARY)),
        ((None, head(9), head(5)), (0, 0, 1), (Tier.STANDARD, ReleaseReason.ORDINARY)),
        ((None, head(9), head(5)), (0, 5, 0), (Tier.BATCH, ReleaseReason.FLOOR)),
        ((None, None, head(5)), (0, 0, 17), (Tier.BATCH, ReleaseReason.ORDINARY)),
        ((None, None, head(5)), (0, 0, 18), None),
        ((None, head(9), None), (0, 18, 0), None),
        ((head(9), head(1), None), (0, 18, 0), None),
        ((None, head(9, 40), None), (0, 0, 0), (Tier.STANDARD, ReleaseReason.ORDINARY)),
        ((None, head(9, 40), None), (0, 1, 0), None),
    ],
)
def test_the_order_of_release(
    heads: tuple[QueueHead | None, ...],
    held_by: tuple[int, int, int],
    expected: tuple[Tier, ReleaseReason] | None,
) -> None:
    """At 16 sequences (look-ahead 2, batch floor 1) and at second 10, nothing overdue."""
    assert decide_next(heads, held_by, Room(16), RULE, 10 * SECOND) == expected


def test_aged_batch_goes_before_standard_that_came_later() -> None:
    """Within its share batch is ordered by arrival + 30 s."""
    heads = (None, head(100), head(60))
    assert decide_next(heads, (0, 5, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.BATCH,
        ReleaseReason.ORDINARY,
    )
    younger = (None, head(100), head(80))
    assert decide_next(younger, (0, 5, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        ReleaseReason.ORDINARY,
    )


def test_batch_beyond_its_share_yields_while_others_wait() -> None:
    """30% of 16 are 4: the fifth waits for standard, however old it is."""
    heads = (None, head(99), head(1))
    assert decide_next(heads, (0, 0, 4), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        ReleaseReason.ORDINARY,
    )


def test_overdue_goes_even_before_realtime_when_its_tier_holds_nothing() -> None:
    """A flood of realtime requests cannot starve the tiers below it: each keeps one turn."""
    heads = (head(100), head(60), head(50))
    assert decide_next(heads, (16, 0, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        ReleaseReason.OVERDUE,
    )


def test_only_realtime_passes_an_overdue_request_that_needs_more_room() -> None:
    """Eight sequences need eight slots: realtime goes on meanwhile, and after 120 s nothing does."""
    heads = (head(200), head(200), head(150, 8))
    assert decide_next(heads, (10, 5, 0), Room(16), RULE, 200 * SECOND) == (
        Tier.REALTIME,
        ReleaseReason.ORDINARY,
    )
    assert decide_next(heads, (5, 5, 0), Room(16), RULE, 200 * SECOND) == (
        Tier.BATCH,
        ReleaseReason.OVERDUE,
    )
    assert decide_next((None, *heads[1:]), (10, 5, 0), Room(16), RULE, 200 * SECOND) is None
    assert decide_next(heads, (10, 5, 0), Room(16), RULE, 271 * SECOND) is None


def test_batch_that_lies_behind_all_others_in_vllm_fills_no_floor() -> None:
    """Released for a look-ahead it waits there until it has aged; another goes first in its stead."""
    heads, holds = (None, head(1), head(1)), (0, 10, 1)
    ahead = decide_next(heads, holds, Room(16), RULE, 2 * SECOND, floor_held=0)
    assert ahead == (Tier.BATCH, ReleaseReason.FLOOR)
    filled = decide_next(heads, holds, Room(16), RULE, 2 * SECOND, floor_held=1)
    assert filled == (Tier.STANDARD, ReleaseReason.ORDINARY)


def test_the_reserve_holds_back_all_but_realtime() -> None:
    """Of 16 (+2 look-ahead) one is kept for realtime while realtime comes."""
    reserved = Room(16, reserved=True)
    assert decide_next((None, head(1), None), (0, 17, 0), reserved, RULE, 2 * SECOND) is None
    assert decide_next((head(1), None, None), (0, 17, 0), reserved, RULE, 2 * SECOND) == (
        Tier.REALTIME,
        ReleaseReason.ORDINARY,
    )


def test_nothing_is_released_while_memory_is_above_its_cap() -> None:
    """The pod finishes what it holds first."""
    heads = (head(1), head(1), head(1))
    assert decide_next(heads, (0, 0, 0), Room(16, stopped=True), RULE, SECOND) is None


HEADS = st.tuples(
    *[
        st.none()
        | st.builds(Candidate, sequences=st.integers(1, 12), arrival_us=st.integers(1, 10**9))
    ]
    * 3
)
ROOMS = st.builds(
    Room,
    sequences=st.integers(1, 64),
    share_ratios=st.tuples(*[st.floats(0.01, 1.0)] * 3),
    batch_floor_ratio=st.floats(0.0, 0.3),
    reserved=st.booleans(),
)
HELD = st.tuples(*[st.integers(0, 40)] * 3)


@examples(100, guarded=True)
@given(HEADS, HELD, ROOMS, st.integers(1, 2 * 10**9))
def test_a_release_stays_within_room_share_and_reserve(
    heads: tuple[QueueHead | None, ...], held_by: tuple[int, int, int], room: Room, now_us: int
) -> None:
    """Whatever waits and is held: only a tier that waits, within the total, and within its limits."""
    chosen = decide_next(heads, held_by, room, RULE, now_us)
    if chosen is None:
        return
    tier, reason = chosen
    first = heads[tier]
    assert first is not None
    charged = room.charge(tier, first.sequences)
    assert sum(held_by) == 0 or sum(held_by) + charged <= room.total
    below = held_by[Tier.STANDARD] + held_by[Tier.BATCH]
    if tier is not Tier.REALTIME and reason is not ReleaseReason.OVERDUE:
        assert below == 0 or below + charged <= room.total - reserve_of(room.sequences) * int(
            room.reserved
        )
    others_wait = any(h is not None for t, h in enumerate(heads) if t != tier)
    if tier is Tier.BATCH and reason is ReleaseReason.ORDINARY and others_wait and held_by[tier]:
        assert held_by[tier] + charged <= room.share(Tier.BATCH)


@examples(100, guarded=True)
@given(HEADS, ROOMS, st.integers(1, 2 * 10**9))
def test_an_empty_engine_always_takes_something(
    heads: tuple[QueueHead | None, ...], room: Room, now_us: int
) -> None:
    """With nothing held nothing can hold a request back, however large it is: no deadlock."""
    chosen = decide_next(heads, (0, 0, 0), room, RULE, now_us)
    assert (chosen is None) == (heads == (None, None, None))


@examples(100, guarded=True)
@given(st.sampled_from(Tier), st.integers(1, 40), HELD, ROOMS, st.integers(30 * SECOND, 2 * 10**9))
def test_a_request_alone_is_decided_as_among_others(
    tier: Tier, sequences: int, held_by: tuple[int, int, int], room: Room, now_us: int
) -> None:
    """The short way, past the queue, says what the long one would."""
    heads: list[QueueHead | None] = [None, None, None]
    heads[tier] = Candidate(sequences, now_us)
    among = decide_next(heads, held_by, room, RULE, now_us)
    assert fits_alone(tier, sequences, held_by, room) == (among == (tier, ReleaseReason.ORDINARY))


def test_the_drain_rate_is_measured_and_forgotten() -> None:
    """Ten ends a second are seen as such after a while, and as fewer when they stop."""
    rate = DrainRate()
    for tenth in range(1, 1000):
        rate = rate.after(1, tenth / 10)
    assert rate.at_time(100.0) == pytest.approx(10.0, rel=0.05)
    assert rate.at_time(110.0) == pytest.approx(10.0 / math.e, rel=0.05)
    assert rate.retry_after_s(195, 100.0) == 10
    assert rate.retry_after_s(1, 100.0) == 1
    assert rate.retry_after_s(10**6, 100.0) == 60
