"""Admission: who leaves the queue next, who is refused, and that nobody waits for ever."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetkeeper_engine.admission import Admission, Refusal, Ticket
from fleetkeeper_engine.admission_rules import (
    Candidate,
    DrainRate,
    Head,
    Room,
    decide_next,
    fits_alone,
)
from fleetkeeper_engine.arrivals import RETRY_MEMORY_S, Arrivals
from fleetkeeper_engine.inside import InsideSettings
from fleetkeeper_engine.page_layout import Outcome, SupervisorBlock, Tier
from fleetkeeper_engine.priority import PriorityRule, Turn, goes_first, is_realtime, request_of
from fleetkeeper_engine.scheduler_limits import RESERVE_KEPT_S, look_ahead_of, reserve_of

RULE = PriorityRule(standard_offset_us=0, batch_ageing_us=30_000_000)
SECOND = 1_000_000
TIERS = st.sampled_from(Tier)


def admission(**changes: float) -> Admission:
    values: dict[str, int | float] = {
        "max_sequences": 16,
        "realtime_queue_limit": 1000,
        "standard_queue_limit": 1000,
        "batch_queue_limit": 1000,
    }
    return Admission(InsideSettings(**{**values, **changes}))  # type: ignore[arg-type]


def enter(queue: Admission, tier: Tier, now: float, sequences: int = 1) -> Ticket:
    assert queue.refuse(tier, None, now) is None
    ticket = queue.enter(tier, sequences, now, now)
    assert isinstance(ticket, Ticket)
    return ticket


def held(queue: Admission) -> int:
    return sum(state.held for state in queue.tiers)


# --- the priority number


@given(TIERS, st.integers(1, 2**50), st.sampled_from(Turn))
def test_a_number_says_what_it_was_made_from(tier: Tier, arrival_us: int, turn: Turn) -> None:
    """Tier, turn and arrival come back, within vLLM's signed 64 bits, also for later turns of a tool call."""
    rule = PriorityRule(1_000_000, 30_000_000)
    number = rule.number(tier, arrival_us, turn)
    assert -(2**63) <= number < 2**63
    for spent in (0, 5, 15):
        origin = rule.origin(number - spent)
        assert origin is not None
        assert (origin.tier, origin.turn, origin.arrival_us) == (tier, turn, arrival_us)
        assert request_of(number - spent) == request_of(number)
        assert is_realtime(number - spent) == (tier is Tier.REALTIME)


@given(st.integers(1, 2**50), st.integers(1, 2**50))
def test_bands_hold_whatever_the_arrivals(early: int, late: int) -> None:
    """Realtime and overdue before floor before ordinary; goes_first tells the first band."""
    number = RULE.number
    first = {number(Tier.REALTIME, late), number(Tier.BATCH, late, Turn.OVERDUE)}
    floor = number(Tier.BATCH, late, Turn.FLOOR)
    ordinary = number(Tier.STANDARD, early)
    assert max(first) < floor < ordinary
    assert all(map(goes_first, first))
    assert not goes_first(floor)
    assert not goes_first(ordinary)


@pytest.mark.parametrize("number", [0, 1, 255, -1, 7, 2**62])
def test_foreign_numbers_have_no_origin(number: int) -> None:
    """The supervisor's own request (0) and numbers that we did not make are not taken for ours."""
    assert RULE.origin(number) is None


def test_ageing_lets_batch_pass_standard_that_came_30_s_later() -> None:
    """Priority is fixed at admission: ageing needs no later change."""
    batch = RULE.number(Tier.BATCH, 10 * SECOND)
    assert RULE.number(Tier.STANDARD, 39 * SECOND) < batch < RULE.number(Tier.STANDARD, 41 * SECOND)


# --- who is next


def head(arrival_s: float, sequences: int = 1) -> Candidate:
    return Candidate(sequences, int(arrival_s * SECOND))


@pytest.mark.parametrize(
    ("heads", "held_by", "expected"),
    [
        ((None, None, None), (0, 0, 0), None),
        ((head(9), head(1), head(1)), (0, 1, 1), (Tier.REALTIME, Turn.ORDINARY)),
        ((None, head(9), head(5)), (0, 0, 1), (Tier.STANDARD, Turn.ORDINARY)),
        ((None, head(9), head(5)), (0, 5, 0), (Tier.BATCH, Turn.FLOOR)),
        ((None, None, head(5)), (0, 0, 17), (Tier.BATCH, Turn.ORDINARY)),
        ((None, None, head(5)), (0, 0, 18), None),
        ((None, head(9), None), (0, 18, 0), None),
        ((head(9), head(1), None), (0, 18, 0), None),
        ((None, head(9, 40), None), (0, 0, 0), (Tier.STANDARD, Turn.ORDINARY)),
        ((None, head(9, 40), None), (0, 1, 0), None),
    ],
)
def test_the_order_of_release(
    heads: tuple[Head | None, ...],
    held_by: tuple[int, int, int],
    expected: tuple[Tier, Turn] | None,
) -> None:
    """At 16 sequences (look-ahead 2, batch floor 1) and at second 10, nothing overdue."""
    assert decide_next(heads, held_by, Room(16), RULE, 10 * SECOND) == expected


def test_aged_batch_goes_before_standard_that_came_later() -> None:
    """Within its share batch is ordered by arrival + 30 s."""
    heads = (None, head(100), head(60))
    assert decide_next(heads, (0, 5, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.BATCH,
        Turn.ORDINARY,
    )
    younger = (None, head(100), head(80))
    assert decide_next(younger, (0, 5, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        Turn.ORDINARY,
    )


def test_batch_beyond_its_share_yields_while_others_wait() -> None:
    """30% of 16 are 4: the fifth waits for standard, however old it is."""
    heads = (None, head(99), head(1))
    assert decide_next(heads, (0, 0, 4), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        Turn.ORDINARY,
    )


def test_overdue_goes_even_before_realtime_when_its_tier_holds_nothing() -> None:
    """A flood of realtime requests cannot starve the tiers below it: each keeps one turn."""
    heads = (head(100), head(60), head(50))
    assert decide_next(heads, (16, 0, 1), Room(16), RULE, 100 * SECOND) == (
        Tier.STANDARD,
        Turn.OVERDUE,
    )


def test_only_realtime_passes_an_overdue_request_that_needs_more_room() -> None:
    """Eight sequences need eight slots: realtime goes on meanwhile, and after 120 s nothing does."""
    heads = (head(200), head(200), head(150, 8))
    assert decide_next(heads, (10, 5, 0), Room(16), RULE, 200 * SECOND) == (
        Tier.REALTIME,
        Turn.ORDINARY,
    )
    assert decide_next(heads, (5, 5, 0), Room(16), RULE, 200 * SECOND) == (
        Tier.BATCH,
        Turn.OVERDUE,
    )
    assert decide_next((None, *heads[1:]), (10, 5, 0), Room(16), RULE, 200 * SECOND) is None
    assert decide_next(heads, (10, 5, 0), Room(16), RULE, 271 * SECOND) is None


def test_batch_that_lies_behind_all_others_in_vllm_fills_no_floor() -> None:
    """Released for a look-ahead it waits there until it has aged; another goes first in its stead."""
    heads, holds = (None, head(1), head(1)), (0, 10, 1)
    ahead = decide_next(heads, holds, Room(16), RULE, 2 * SECOND, floor_held=0)
    assert ahead == (Tier.BATCH, Turn.FLOOR)
    filled = decide_next(heads, holds, Room(16), RULE, 2 * SECOND, floor_held=1)
    assert filled == (Tier.STANDARD, Turn.ORDINARY)


def test_the_reserve_holds_back_all_but_realtime() -> None:
    """Of 16 (+2 look-ahead) one is kept for realtime while realtime comes."""
    reserved = Room(16, reserved=True)
    assert decide_next((None, head(1), None), (0, 17, 0), reserved, RULE, 2 * SECOND) is None
    assert decide_next((head(1), None, None), (0, 17, 0), reserved, RULE, 2 * SECOND) == (
        Tier.REALTIME,
        Turn.ORDINARY,
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


@given(HEADS, HELD, ROOMS, st.integers(1, 2 * 10**9))
def test_a_release_stays_within_room_share_and_reserve(
    heads: tuple[Head | None, ...], held_by: tuple[int, int, int], room: Room, now_us: int
) -> None:
    """Whatever waits and is held: only a tier that waits, within the total, and within its limits."""
    chosen = decide_next(heads, held_by, room, RULE, now_us)
    if chosen is None:
        return
    tier, turn = chosen
    first = heads[tier]
    assert first is not None
    assert sum(held_by) == 0 or sum(held_by) + first.sequences <= room.total
    below = held_by[Tier.STANDARD] + held_by[Tier.BATCH]
    if tier is not Tier.REALTIME and turn is not Turn.OVERDUE:
        assert below == 0 or below + first.sequences <= room.total - reserve_of(
            room.sequences
        ) * int(room.reserved)
    others_wait = any(h is not None for t, h in enumerate(heads) if t != tier)
    if tier is Tier.BATCH and turn is Turn.ORDINARY and others_wait and held_by[tier]:
        assert held_by[tier] + first.sequences <= room.share(Tier.BATCH)


@given(HEADS, ROOMS, st.integers(1, 2 * 10**9))
def test_an_empty_engine_always_takes_something(
    heads: tuple[Head | None, ...], room: Room, now_us: int
) -> None:
    """With nothing held nothing can hold a request back, however large it is: no deadlock."""
    chosen = decide_next(heads, (0, 0, 0), room, RULE, now_us)
    assert (chosen is None) == (heads == (None, None, None))


@given(st.sampled_from(Tier), st.integers(1, 40), HELD, ROOMS, st.integers(30 * SECOND, 2 * 10**9))
def test_a_request_alone_is_decided_as_among_others(
    tier: Tier, sequences: int, held_by: tuple[int, int, int], room: Room, now_us: int
) -> None:
    """The short way, past the queue, says what the long one would."""
    heads: list[Head | None] = [None, None, None]
    heads[tier] = Candidate(sequences, now_us)
    among = decide_next(heads, held_by, room, RULE, now_us)
    assert fits_alone(tier, sequences, held_by, room) == (among == (tier, Turn.ORDINARY))


# --- the queue as a whole


@dataclass
class Load:
    """Requests that keep coming, in steps of a tenth of a second; each stays 0.5 to 1.5 s."""

    queue: Admission

    def run(self, arrivals: dict[Tier, int], until_s: float) -> dict[Tier, list[float]]:
        """Arrivals a step by tier; returns the waits of the released."""
        waits: dict[Tier, list[float]] = {tier: [] for tier in Tier}
        inside: list[tuple[float, Ticket]] = []
        for step in range(1, int(until_s * 10)):
            now = step / 10
            for tier, count in arrivals.items():
                for _ in range(count):
                    if self.queue.refuse(tier, None, now) is None:
                        self.queue.enter(tier, 1, now, now)
            for end, ticket in [pair for pair in inside if pair[0] <= now]:
                self.queue.finish(ticket, now)
                inside.remove((end, ticket))
            for ticket in self.queue.take_released(now):
                stay = 0.5 + ticket.arrival_us * 37 % 101 / 101
                inside.append((now + stay, ticket))
                waits[ticket.tier].append(now - ticket.arrival_us / SECOND)
            assert held(self.queue) <= self.queue.room(now).total
        return waits


def test_at_twice_the_capacity_realtime_does_not_wait_and_batch_gets_its_floor() -> None:
    """18 slots, 1 s each = 18/s; offered 40/s. Realtime waits two steps at p95; batch keeps 5% to 30%."""
    queue = admission(batch_queue_limit=100, standard_queue_limit=100)
    waits = Load(queue).run({Tier.REALTIME: 1, Tier.STANDARD: 2, Tier.BATCH: 1}, 120)
    assert sorted(waits[Tier.REALTIME])[int(0.95 * len(waits[Tier.REALTIME]))] <= 0.2
    released = sum(map(len, waits.values()))
    assert 0.05 <= len(waits[Tier.BATCH]) / released <= 0.31
    assert released >= 0.9 * 17 * 118


def test_batch_alone_gets_everything() -> None:
    """Once the others are gone no share, floor or reserve idles a slot."""
    queue = admission()
    enter(queue, Tier.REALTIME, 1.0)
    (first,) = queue.take_released(1.0)
    queue.finish(first, 2.0)
    now = 2.0 + RESERVE_KEPT_S
    for _ in range(40):
        enter(queue, Tier.BATCH, now)
    assert len(queue.take_released(now)) == 16 + look_ahead_of(16)


def test_a_flood_of_realtime_does_not_starve_the_others() -> None:
    """Realtime alone offers more than the capacity for five minutes; one turn a tier is kept."""
    queue = admission(realtime_queue_limit=50)
    waits = Load(queue).run({Tier.REALTIME: 3, Tier.STANDARD: 1, Tier.BATCH: 1}, 300)
    assert len(waits[Tier.STANDARD]) >= 5
    assert len(waits[Tier.BATCH]) >= 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(TIERS, st.integers(1, 30)), min_size=1, max_size=60),
    st.integers(1, 32),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_every_request_is_released_within_a_bound(
    offered: list[tuple[Tier, int]], sequences: int, floor_percent: int, random: object
) -> None:
    """Any mix of tiers and sizes, any limit: when requests end, each waiting one gets its turn.

    One request ends at a time, in random order, and realtime requests keep coming. No more than all
    older requests and one realtime for each can go before it.
    """
    queue = admission(max_sequences=sequences, batch_floor_percent=floor_percent)
    for number, (tier, size) in enumerate(offered):
        enter(queue, tier, 1.0 + number / 1000, size)
    inside: list[Ticket] = []
    left = {id(t): t for s in queue.tiers for t in s.queue.values()}
    now = 2.0
    for _ in range(40 * len(offered) + 400):
        now += 1.0
        inside.extend(queue.take_released(now))
        for ticket in inside:
            left.pop(id(ticket), None)
        if not left:
            break
        assert inside, "something waits, nothing is held, nothing is released"
        queue.finish(inside.pop(random.randrange(len(inside))), now)  # type: ignore[attr-defined]
        if len(queue.tiers[Tier.REALTIME].queue) < 3:
            enter(queue, Tier.REALTIME, now)
    assert not left


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), TIERS, st.integers(1, 6), st.integers(0, 3)),
        min_size=1,
        max_size=60,
    )
)
def test_past_the_queue_is_as_through_it(
    arrivals: list[tuple[float, Tier, int, int]],
) -> None:
    """Whatever came before: the same are released, in the same order, with the same word on them."""
    through, past = admission(), admission()
    inside: list[tuple[Ticket, Ticket]] = []
    now = 1000.0
    for wait_s, tier, sequences, ended in arrivals:
        now += wait_s
        for _ in range(min(ended, len(inside))):
            for queue, ticket in zip((through, past), inside.pop(0), strict=True):
                queue.finish(ticket, now)
        assert [q.refuse(tier, None, now) for q in (through, past)] == [None, None]
        entered = through.enter(tier, sequences, now, now)
        passed = past.pass_by(tier, sequences, now, now) or past.enter(tier, sequences, now, now)
        assert isinstance(entered, Ticket)
        assert isinstance(passed, Ticket)
        left = [passed] if passed.priority is not None else past.take_released(now)
        taken = through.take_released(now)
        assert [(t.tier, t.turn, t.sequences) for t in taken] == [
            (t.tier, t.turn, t.sequences) for t in left
        ]
        inside += zip(taken, left, strict=True)
    for one, other in zip(through.tiers, past.tiers, strict=True):
        assert (one.held, one.held_first, one.released) == (
            other.held,
            other.held_first,
            other.released,
        )
        assert (len(one.queue), one.waiting_sequences) == (
            len(other.queue),
            other.waiting_sequences,
        )
    assert through.outcomes == past.outcomes


def test_waiting_is_bounded_and_the_answer_says_when_to_come_back() -> None:
    """A full queue answers at once, with the time in which half of it drains."""
    queue = admission(max_sequences=1, standard_queue_limit=4)
    tickets = [enter(queue, Tier.STANDARD, 1.0) for _ in range(3)]
    assert queue.take_released(1.0) == tickets
    for _ in range(4):
        enter(queue, Tier.STANDARD, 1.0)
    refusal = queue.refuse(Tier.STANDARD, None, 1.0)
    assert refusal == Refusal(Outcome.QUEUE_FULL, Tier.STANDARD, 4, retry_after_s=5)
    for second in range(2, 5):
        queue.finish(tickets[second - 2], float(second))
    refusal = queue.refuse(Tier.STANDARD, None, 4.0)
    assert refusal is not None
    assert refusal.retry_after_s == math.ceil(0.5 * 4 / queue.tiers[1].rate.at_time(4.0))
    assert queue.refuse(Tier.BATCH, None, 4.0) is None


def test_a_queue_limit_of_nothing_still_lets_in_what_need_not_wait() -> None:
    """The limit bounds waiting, not running."""
    queue = admission(realtime_queue_limit=0)
    ticket = enter(queue, Tier.REALTIME, 1.0)
    assert queue.take_released(1.0) == [ticket]


def test_a_client_that_hangs_up_frees_its_place_or_its_slots_once() -> None:
    """In the queue it counts as cancelled, inside vLLM its sequences come free; twice changes nothing."""
    queue = admission(max_sequences=1)
    inside = enter(queue, Tier.STANDARD, 1.0, sequences=3)
    queue.take_released(1.0)
    waiting = enter(queue, Tier.STANDARD, 1.0, sequences=2)
    assert queue.take_released(1.0) == []
    for ticket in (waiting, inside, waiting, inside):
        queue.finish(ticket, 2.0)
    state = queue.tiers[Tier.STANDARD]
    assert [len(state.queue), state.waiting_sequences] == [0, 0]
    assert [state.held, state.released] == [0, 0]
    counts = dict(zip(Outcome, queue.outcomes[5:10], strict=True))
    assert counts[Outcome.CANCELLED] == 1
    assert counts[Outcome.ADMITTED] == 1


# --- orders and the pod's own rule


def orders(**changes: object) -> SupervisorBlock:
    return SupervisorBlock(**{"generation": 1, "lease_deadline": 100.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "let_in"), [(1.0, 100), (0.6, 60), (0.05, 5), (0.0, 0)])
def test_the_ordered_share_of_arrivals_is_let_in(share: float, let_in: int) -> None:
    """Exactly, evenly spread, without dice: 0.6 lets in 60 of 100."""
    queue = admission()
    queue.take_orders(orders(admit=(1.0, share, 1.0)))
    refusals = [queue.refuse(Tier.STANDARD, None, 1.0) for _ in range(100)]
    assert sum(refusal is None for refusal in refusals) == let_in
    assert {r.outcome for r in refusals if r is not None} <= {Outcome.TIER_CLOSED}


def test_batch_shut_by_order_keeps_its_floor_but_not_when_it_is_closed() -> None:
    """An opened load breaker leaves batch its floor; `closed` leaves nothing."""
    queue = admission()
    queue.take_orders(orders(admit=(1.0, 1.0, 0.0)))
    enter(queue, Tier.BATCH, 1.0)
    refusal = queue.refuse(Tier.BATCH, None, 1.0)
    assert refusal is not None
    assert refusal.outcome is Outcome.TIER_CLOSED
    queue = admission()
    queue.take_orders(orders(closed=(False, False, True)))
    assert queue.refuse(Tier.BATCH, None, 1.0) is not None
    assert queue.refuse(Tier.STANDARD, None, 1.0) is None


def test_draining_refuses_everything_and_at_its_end_empties_the_queue() -> None:
    """What waits may still run until the deadline; then it is answered."""
    queue = admission(max_sequences=1)
    for _ in range(5):
        enter(queue, Tier.STANDARD, 1.0)
    assert len(queue.take_released(1.0)) == 3
    queue.take_orders(orders(draining=True))
    refusal = queue.refuse(Tier.REALTIME, None, 2.0)
    assert refusal is not None
    assert refusal.outcome is Outcome.DRAINING
    expelled = queue.expel(3.0)
    assert len(expelled) == 2
    assert all(ticket.done for ticket in expelled)
    assert [len(state.queue) for state in queue.tiers] == [0, 0, 0]


def test_when_the_lease_ends_orders_count_no_more() -> None:
    """A dead operator closes no tier and changes no share."""
    queue = admission()
    queue.take_orders(orders(admit=(1.0, 0.0, 0.0), shares=(0.1, 0.1, 0.1)))
    assert queue.refuse(Tier.STANDARD, None, 99.9) is not None
    assert queue.room(99.9).share_ratios == (0.1, 0.1, 0.1)
    assert queue.refuse(Tier.STANDARD, None, 100.0) is None
    assert queue.room(100.0).share_ratios == (1.0, 1.0, 0.3)


def test_the_pods_own_rule_closes_batch_until_the_wait_has_halved() -> None:
    """Objective 0.5 s: closed above it, open again below 0.25 s, never under a lease."""
    queue = admission(max_sequences=1)
    for _ in range(4):
        enter(queue, Tier.STANDARD, 1.0)
    tickets = queue.take_released(1.0)
    queue.tick((0.0, 0.0, 0.0), 1.4)
    assert not queue.own_rule_closed
    queue.tick((0.0, 0.0, 0.0), 1.6)
    assert queue.own_rule_closed
    enter(queue, Tier.BATCH, 1.6)
    refusal = queue.refuse(Tier.BATCH, None, 1.6)
    assert refusal is not None
    assert refusal.outcome is Outcome.TIER_CLOSED
    for ticket in tickets[:2]:
        queue.finish(ticket, 1.7)
    assert len(queue.take_released(1.7)) == 2
    queue.tick((0.0, 1.4, 0.0), 1.7)
    assert queue.own_rule_closed, "0.3 s inside the engine is more than half the objective"
    queue.tick((0.0, 0.0, 0.0), 1.8)
    assert not queue.own_rule_closed
    queue.tick((0.0, 1.0, 0.0), 9.0)
    queue.take_orders(orders())
    queue.tick((0.0, 1.0, 0.0), 10.0)
    assert not queue.own_rule_closed


def test_a_lower_limit_releases_fewer_and_kills_nothing() -> None:
    """Lowering drains: what is inside stays, the next waits until enough ended."""
    queue = admission(min_sequences=1)
    tickets = [enter(queue, Tier.STANDARD, 1.0) for _ in range(30)]
    inside = queue.take_released(1.0)
    assert len(inside) == 18
    queue.take_orders(orders(sequences=4))
    for ticket in inside[:12]:
        queue.finish(ticket, 2.0)
        assert queue.take_released(2.0) == []
    queue.finish(inside[12], 2.0)
    assert queue.take_released(2.0) == [tickets[18]]


# --- counting


def test_arrivals_are_counted_once_and_in_one_second_bins() -> None:
    """A retry by the same id within a minute is not a new arrival; squares are of whole bins."""
    arrivals = Arrivals()
    counted = [
        arrivals.saw(Tier.STANDARD, request_id, now)
        for request_id, now in [
            (b"a", 5.1),
            (b"a", 5.2),
            (b"b", 5.9),
            (None, 6.0),
            (None, 6.1),
        ]
    ]
    assert counted == [True, False, True, True, True]
    assert arrivals.saw(Tier.BATCH, b"a", 5.2 + RETRY_MEMORY_S)
    assert arrivals.total == [0, 4, 1]
    assert arrivals.squared == [0, 2**2 + 2**2, 0]


def test_the_memory_of_request_ids_is_bounded() -> None:
    """Clients cannot make the pod remember more than 65,536 ids."""
    arrivals = Arrivals()
    for number in range(70_000):
        arrivals.saw(Tier.STANDARD, b"%d" % number, 1.0)
    assert len(arrivals._seen) <= 65_536
    assert arrivals.total[Tier.STANDARD] == 70_000


def test_of_a_long_request_id_the_beginning_counts() -> None:
    """A client cannot fill the pod's memory with one header: 128 bytes are kept and compared."""
    arrivals = Arrivals()
    assert arrivals.saw(Tier.STANDARD, b"x" * 5000, 1.0)
    assert not arrivals.saw(Tier.STANDARD, b"x" * 128 + b"another end", 2.0)
    assert {len(known) for known in arrivals._seen} == {128}


_DOINGS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "pass by", "release", "finish", "hang up", "expel"]),
        TIERS,
        st.integers(1, 4),
    ),
    max_size=80,
)


@given(_DOINGS)
def test_what_is_counted_as_it_comes_and_goes_is_what_is_there(
    doings: list[tuple[str, Tier, int]],
) -> None:
    """Requests waiting and inside, kept as they change, are those of the tiers at every moment."""
    queue = admission(max_sequences=4, standard_queue_limit=5)
    waiting: list[Ticket] = []
    inside: list[Ticket] = []
    for number, (doing, tier, sequences) in enumerate(doings):
        now = 1.0 + number / 10
        if doing == "enter" or (doing == "pass by" and queue.waiting):
            ticket = queue.enter(tier, sequences, now, now)
            waiting += [ticket] if isinstance(ticket, Ticket) else []
        elif doing == "pass by":
            passed = queue.pass_by(tier, sequences, now, now)
            inside += [passed] if passed else []
        elif doing == "release":
            for taken in queue.take_released(now):
                waiting.remove(taken)
                inside.append(taken)
        elif doing == "finish" and inside:
            queue.finish(inside.pop(0), now)
        elif doing == "hang up" and waiting:
            gone = waiting.pop(-1)
            queue.finish(gone, now)
            queue.finish(gone, now)
        elif doing == "expel":
            for expelled in queue.expel(now):
                waiting.remove(expelled)
                queue.finish(expelled, now)
        assert queue.waiting == len(waiting) == sum(len(state.queue) for state in queue.tiers)
        assert queue.released == len(inside) == sum(state.released for state in queue.tiers)
        assert queue.in_hand == len(waiting) + len(inside)


@given(st.lists(TIERS, max_size=200))
def test_every_arrival_has_one_outcome_in_the_end(tiers: list[Tier]) -> None:
    """Admitted, refused or cancelled: the outcomes add up to the arrivals."""
    queue = admission(max_sequences=4, standard_queue_limit=3, batch_queue_limit=3)
    entered = []
    for number, tier in enumerate(tiers):
        now = 1.0 + number / 100
        if queue.refuse(tier, None, now) is None:
            entered.append(queue.enter(tier, 1, now, now))
        queue.take_released(now)
    for ticket in entered:
        assert isinstance(ticket, Ticket)
        queue.finish(ticket, 50.0)
    assert sum(queue.outcomes) == len(tiers) == sum(queue.arrivals.total)
    assert Counter(tiers) == Counter(
        {tier: sum(queue.outcomes[tier * 5 : tier * 5 + 5]) for tier in Tier}
    )


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
