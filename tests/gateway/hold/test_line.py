"""The order of held requests, how fast they may try, and what ends their hold. The clock is the test's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold.line import AWAKE_WAIT_S, DECISION_S, PERIOD_S, Line, Waiter
from fleetkeeper_gateway.interfaces import HoldRefused, Service
from tests.gateway.http.world import asleep, service

HOLD_S = 55.0
ASLEEP = service(sleep=asleep())
AWAKE = service()


class Waits:
    """A line, its service, and a clock that the test advances."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.line = Line("team/chat", HOLD_S, now)
        self.service: Service | None = ASLEEP
        self.seen_at = now

    def join(self, tier: Tier = Tier.STANDARD, tenant: str = "a", model: str = "m") -> Waiter:
        return self.line.join(tier, tenant, model, self.now)

    def become(self, changed: Service | None) -> None:
        self.service, self.seen_at = changed, self.now

    def step(self, after_s: float = 0.0) -> list[Waiter]:
        """Advances the clock, and returns the requests that may try now and could not before."""
        self.now += after_s
        before = set(self.line.trying)
        self.line.step(self.now, self.service, self.now - self.seen_at)
        return [waiter for waiter in self.line.trying if waiter not in before]

    def accept(self, *waiters: Waiter) -> None:
        for waiter in waiters:
            self.line.accepted(waiter, self.now)

    def refuse(self, *waiters: Waiter, is_shed: bool = False) -> None:
        for waiter in waiters:
            self.line.refused(waiter, self.now, is_shed=is_shed)

    def order(self) -> list[Waiter]:
        """Accepts one request after the other, and returns their order."""
        found: list[Waiter] = []
        while started := self.step(PERIOD_S):
            found += started
            self.accept(*started)
            for waiter in started:
                self.line.leave(waiter)
        return found


@pytest.fixture
def waits() -> Waits:
    """A service that sleeps."""
    return Waits()


def end_of(waiter: Waiter) -> HoldRefused | None:
    """Returns why a request is not held anymore; None if it may try."""
    return waiter.turn.result()


async def test_an_urgent_tier_is_first_and_then_arrival(waits: Waits) -> None:
    standard = [waits.join() for _ in range(2)]
    realtime = [waits.join(Tier.REALTIME) for _ in range(2)]
    assert waits.line.tier is Tier.REALTIME
    assert waits.order() == [*realtime, *standard]
    assert waits.line.held == 0


async def test_tenants_take_turns(waits: Waits) -> None:
    """A tenant with a hundred requests delays another one by one request, not by a hundred."""
    many = [waits.join(tenant="many") for _ in range(100)]
    few = [waits.join(tenant="few") for _ in range(3)]
    assert waits.order()[:6] == [many[0], few[0], many[1], few[1], many[2], few[2]]


async def test_a_tenant_that_comes_later_starts_in_the_present_round(waits: Waits) -> None:
    many = [waits.join(tenant="many") for _ in range(10)]
    for waiter in many[:5]:
        assert waits.step() == [waiter]
        waits.accept(waiter)
        waits.line.leave(waiter)
        waits.line.window = 1
    late = waits.join(tenant="late")
    assert waits.order()[:2] == [late, many[5]]


async def test_one_request_tries_and_keeps_its_place_until_it_is_accepted(waits: Waits) -> None:
    first, second = waits.join(), waits.join()
    for _ in range(20):
        assert waits.step(PERIOD_S) == [first]
        waits.refuse(first)
        assert waits.step() == [], "the next attempt is after a pause"
        assert waits.step(PERIOD_S / 2) == []
    assert waits.step(PERIOD_S) == [first]
    assert waits.step(PERIOD_S) == [], "a second attempt waits for the first"
    waits.accept(first)
    assert waits.step() == [second]


async def test_more_try_at_once_the_more_are_accepted_and_fewer_after_a_refusal(
    waits: Waits,
) -> None:
    for _ in range(100):
        waits.join()
    sizes = []
    for _ in range(5):
        started = waits.step()
        sizes.append(len(started))
        waits.accept(*started)
    assert sizes == [1, 2, 4, 8, 16]
    started = waits.step()
    assert len(started) == 32
    waits.refuse(started[0], is_shed=True)
    assert waits.line.window == 16
    assert waits.step() == []
    waits.accept(*started[1:8])
    assert waits.step(PERIOD_S) == [], "24 still try"
    waits.accept(*started[8:])
    assert waits.step()[0] is started[0], "it keeps its place"


async def test_an_attempt_that_has_a_connection_and_no_answer_for_a_time_is_accepted(
    waits: Waits,
) -> None:
    """Without a connection it is not: packets to a service without endpoints may be dropped."""
    first, second = waits.join(), waits.join()
    assert waits.step() == [first]
    assert waits.step(10 * PERIOD_S) == []
    waits.line.connected(first, waits.now)
    assert waits.step(PERIOD_S * 0.9) == []
    assert waits.step(PERIOD_S * 0.2) == [second]
    assert first.outcome == "sent"
    waits.refuse(first)
    assert waits.line.held == 2
    assert first.outcome == "aborted"
    waits.accept(second)
    assert waits.step(PERIOD_S) == [first]


async def test_nothing_is_tried_while_the_operator_decides(waits: Waits) -> None:
    waits.become(service(sleep=asleep(state="GoingToSleep")))
    first = waits.join()
    assert waits.step(DECISION_S * 0.99) == []
    assert waits.step(DECISION_S * 0.02) == [first]


async def test_an_operator_that_decides_again_and_again_stops_no_request(waits: Waits) -> None:
    """Each step to sleep has a new number. The time of the request counts, not that of the state."""
    first = waits.join()
    for number in range(1, 11):
        waits.become(service(sleep=asleep(state="GoingToSleep", number=number)))
        tried = waits.step(DECISION_S / 8)
        if tried:
            break
    assert tried == [first]
    assert number == 8


async def test_a_service_that_stays_awake_gets_its_requests_at_once(waits: Waits) -> None:
    waits.become(service(sleep=asleep(state="GoingToSleep")))
    first = waits.join()
    assert waits.step() == []
    waits.become(AWAKE)
    assert waits.step() == [first]


async def test_the_hold_ends_after_its_time(waits: Waits) -> None:
    waits.become(service(sleep=asleep(state="Waking", starts=(20, 30, 80))))
    first = waits.join()
    waits.step(30)
    second = waits.join()
    waits.refuse(first)
    waits.step(HOLD_S - 30)
    refused = end_of(first)
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("service_waking", 80 - 55)
    assert not second.turn.done() or end_of(second) is None
    waits.refuse(second)
    waits.step(30)
    refused = end_of(second)
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("service_waking", 1)
    assert waits.line.held == 0


async def test_an_attempt_is_not_cut_off_by_the_end_of_its_hold(waits: Waits) -> None:
    first = waits.join()
    waits.step(HOLD_S - 0.1)
    waits.step(1)
    assert end_of(first) is None
    waits.refuse(first)
    waits.step()
    refused = end_of(first)
    assert refused is not None
    assert refused.code == "service_waking"


@pytest.mark.parametrize("seen", [True, False])
async def test_a_start_that_fails_ends_the_hold_at_once(waits: Waits, seen: bool) -> None:
    """Also if this gateway never saw that the service woke."""
    waits.become(service(sleep=asleep(3, failures=1)))
    waits.step()
    first = waits.join()
    waits.step()
    waits.refuse(first)
    if seen:
        waits.become(service(sleep=asleep(3, "Waking", failures=1)))
        waits.step(PERIOD_S)
        waits.refuse(first)
    waits.become(service(sleep=asleep(4, failures=2)))
    waits.step()
    refused = end_of(first)
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("wake_failed", 60)


async def test_a_request_after_a_failed_start_is_held_for_the_next_one(waits: Waits) -> None:
    waits.become(service(sleep=asleep(4, failures=2)))
    first = waits.join()
    assert waits.step() == [first]
    waits.refuse(first)
    waits.become(service(sleep=asleep(4, "Waking", failures=2)))
    assert waits.step(PERIOD_S) == [first]


@pytest.mark.parametrize(
    ("changed", "code"),
    [(None, "service_unavailable"), (replace(ASLEEP, models=("other",)), "model_not_found")],
)
async def test_a_service_that_is_deleted_or_renames_its_model_ends_the_hold(
    waits: Waits, changed: Service | None, code: str
) -> None:
    waits.step()
    first = waits.join()
    waits.refuse(*waits.step())
    waits.become(changed)
    waits.step()
    refused = end_of(first)
    assert refused is not None
    assert refused.code == code


async def test_a_service_that_is_awake_and_takes_nothing_ends_the_hold(waits: Waits) -> None:
    """For example if it was suspended: no request wakes it."""
    first = waits.join()
    waits.become(AWAKE)
    waits.step()
    waits.refuse(first)
    waits.step(AWAKE_WAIT_S)
    waits.refuse(first, is_shed=True)
    waits.step(AWAKE_WAIT_S)
    assert end_of(first) is None, "a replica that sheds is there"
    waits.refuse(first)
    waits.step(PERIOD_S)
    waits.refuse(first)
    refused = end_of(first)
    assert refused is not None
    assert refused.code == "service_unavailable"


async def test_a_request_that_leaves_is_not_tried(waits: Waits) -> None:
    gone, first = waits.join(), waits.join()
    waits.line.leave(gone)
    assert waits.step() == [first]
    waits.line.leave(first)
    assert waits.line.held == 0
    assert waits.line.waiters == {}


async def test_requests_that_left_take_no_memory(waits: Waits) -> None:
    kept = waits.join()
    for _ in range(10_000):
        waits.line.leave(waits.join())
    assert len(waits.line._heap) < 100
    assert waits.step() == [kept]


async def test_a_request_whose_turn_was_cancelled_is_no_error(waits: Waits) -> None:
    """Its client hung up in the same turn of the event loop."""
    first, second = waits.join(), waits.join()
    first.turn.cancel()
    waits.step()
    waits.line.leave(first)
    assert waits.step() == [second]
    waits.refuse(second)
    second.turn.cancel()
    waits.line.end_all("draining", "", 1, waits.now)
    assert waits.line.held == 0


async def test_a_step_is_due_when_something_changes(waits: Waits) -> None:
    first = waits.join()
    assert waits.line.step(waits.now, ASLEEP, 0) == PERIOD_S
    waits.now += 0.1
    waits.line.connected(first, waits.now)
    assert waits.line.step(waits.now + 0.1, ASLEEP, 0) == pytest.approx(PERIOD_S - 0.1)
    assert math.isinf(waits.line.awake_since)
    waits.line.step(waits.now, AWAKE, 0)
    assert waits.line.awake_since == waits.now
