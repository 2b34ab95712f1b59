"""How many lines run at the same time, with a clock that the test moves."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.workers.pace import Pace, Paces, Slot


def fill(pace: Pace, now: float) -> list[Slot]:
    """Send as many lines as may be sent."""
    slots = [pace.slot(now) for _ in range(pace.free(now))]
    for slot in slots:
        slot.sent(now)
    return slots


def answer(slot: Slot, now: float) -> None:
    slot.pace.answered(slot.began, now)
    slot.pace.ended(now)


def refuse(slot: Slot, now: float, retry_after_s: float | None) -> None:
    slot.pace.refused(slot.began, now, retry_after_s)
    slot.pace.ended(now)


def sleep(slot: Slot, now: float, retry_after_s: float | None) -> None:
    slot.pace.asleep(now, retry_after_s)
    slot.pace.ended(now)


def fail(slot: Slot, now: float) -> None:
    slot.pace.failed(slot.began, now)
    slot.pace.ended(now)


def test_without_refusals_the_most_is_reached_within_seconds_although_lines_take_minutes() -> None:
    pace = Pace(256)
    for second in range(5):
        fill(pace, float(second))
    assert pace.running == 256


def test_short_lines_reach_the_most_within_a_few_round_trips() -> None:
    pace = Pace(256)
    now = 0.0
    for _ in range(4):
        slots = fill(pace, now)
        now += 0.1
        for slot in slots:
            answer(slot, now)
    assert pace.free(now) == 256


def test_lines_that_were_sent_together_halve_it_once() -> None:
    pace = Pace(256)
    pace.limit = 200.0
    slots = fill(pace, 0.0)
    assert len(slots) == 200
    for slot in slots:
        refuse(slot, 1.0, 1.0)
    assert (pace.limit, pace.running) == (100.0, 0)
    assert pace.free(1.5) == 0
    assert pace.wakes(1.5) == 2.0
    (later, *_) = fill(pace, 2.0)
    refuse(later, 2.1, 1.0)
    assert pace.limit == 50.0


def test_nothing_is_sent_before_retry_after_and_a_late_refusal_does_not_halve_again() -> None:
    pace = Pace(256)
    first, second, *_ = fill(pace, 0.0)
    refuse(first, 1.0, 20.0)
    refuse(second, 5.0, 3.0)
    assert pace.limit == 16.0
    assert pace.free(20.9) == 0
    assert pace.wakes(6.0) == 21.0
    fill(pace, 21.0)
    assert pace.running == 30, "those that were not refused still run, and they are more than half"


def test_a_closed_tier_gets_one_line_after_each_retry_after_and_all_again_once_it_opens() -> None:
    pace = Pace(256)
    pace.limit = 256.0
    now, sent = 0.0, []
    for _ in range(40):
        slots = fill(pace, now)
        sent.append(len(slots))
        for slot in slots:
            refuse(slot, now + 0.1, 5.0)
        now = pace.wakes(now + 0.1)
    assert sent[0] == 256
    assert sent[10:] == [1] * 30
    assert now >= 200.0
    for _ in range(9):
        for slot in fill(pace, now):
            answer(slot, now + 1.0)
        now += 1.0
    assert pace.limit >= 128.0, "half of what ran before, at once"


@pytest.mark.parametrize("retry_after", [None, 0.0])
def test_refusals_without_retry_after_wait_longer_and_longer(retry_after: float | None) -> None:
    pace = Pace(8)
    pauses, now = [], 0.0
    for _ in range(12):
        for slot in fill(pace, now):
            refuse(slot, now, retry_after)
        later = pace.wakes(now)
        pauses.append(later - now)
        now = later
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == 30.0


def test_a_service_on_which_everything_fails_gets_time_so_that_few_lines_use_up_their_attempts() -> (
    None
):
    pace = Pace(256)
    now, sent = 0.0, 0
    while now < 600.0:
        slots = fill(pace, now)
        sent += len(slots)
        for slot in slots:
            fail(slot, now)
        now = max(pace.wakes(now), now + 0.01)
    assert sent < 100
    (slot,) = fill(pace, now)
    answer(slot, now)
    assert pace.free(now) >= 1, "it goes on at once when the service is back"


def test_a_line_that_fails_among_others_slows_nothing_down() -> None:
    pace = Pace(256)
    for second in range(200):
        for number, slot in enumerate(fill(pace, float(second))):
            fail(slot, second + 0.5) if number % 8 == 3 else answer(slot, second + 0.5)
    assert pace.limit == 256.0


def test_a_service_that_sleeps_gets_one_line_after_each_retry_after_from_the_first_on() -> None:
    pace = Pace(256)
    now, sent = 0.0, []
    for _ in range(5):
        slots = fill(pace, now)
        sent.append(len(slots))
        for slot in slots:
            sleep(slot, now + 0.1, 30.0)
        assert pace.free(now + 30.0) == 0
        assert pace.wakes(now + 0.2) == now + 30.1
        now += 30.1
    assert sent == [32, 1, 1, 1, 1]


@pytest.mark.parametrize("retry_after", [None, 0.0])
def test_a_service_that_sleeps_without_a_time_is_asked_again_after_half_a_minute(
    retry_after: float | None,
) -> None:
    pace = Pace(8)
    for slot in fill(pace, 0.0):
        sleep(slot, 0.0, retry_after)
    assert (pace.free(29.9), pace.free(30.0)) == (0, 1)


def test_a_service_that_woke_gets_all_lines_within_seconds_although_none_is_answered_yet() -> None:
    pace = Pace(256)
    for slot in fill(pace, 0.0):
        sleep(slot, 0.0, 30.0)
    sent = [len(fill(pace, 30.0 + half / 2)) for half in range(10)]
    assert sent[:4] == [1, 1, 2, 4]
    assert pace.running == 256


def test_a_service_that_falls_asleep_again_is_known_for_what_it_accepted() -> None:
    """Its refusals while it slept say nothing about it."""
    pace = Pace(256)
    pace.limit = 100.0
    for slot in fill(pace, 0.0):
        refuse(slot, 0.0, 1.0)
    (slot,) = [pace.slot(1.0)]
    sleep(slot, 1.0, 30.0)
    for second in range(31, 61):
        fill(pace, float(second))
    assert pace.running == 85, "what it refused, less some"


def test_growth_needs_lines_that_use_it() -> None:
    pace = Pace(256)
    pace.limit = 100.0
    for number in range(1000):
        answer(pace.slot(float(number)), number + 0.5)
    assert pace.limit == 100.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("send", "answer", "refuse", "sleep", "fail", "end")),
            st.floats(0, 30),
            st.one_of(st.none(), st.floats(0, 1000)),
        ),
        max_size=80,
    ),
    st.integers(1, 300),
)
def test_it_stays_within_its_bounds(
    steps: list[tuple[str, float, float | None]], most: int
) -> None:
    pace = Pace(most)
    now = 0.0
    open_slots: list[Slot] = []
    for what, after, retry_after in steps:
        now += after
        if what == "send":
            open_slots += fill(pace, now)
        elif open_slots:
            slot = open_slots.pop(0)
            if what == "answer":
                answer(slot, now)
            elif what == "sleep":
                sleep(slot, now, retry_after)
            elif what == "refuse":
                refuse(slot, now, retry_after)
            elif what == "fail":
                fail(slot, now)
            else:
                pace.ended(now)
        assert pace.running == len(open_slots) <= most
        assert 1.0 <= pace.limit <= most
        assert 0 <= pace.free(now) <= most
        assert pace.wakes(now) >= now
    end = max(now, 0.0) + 301.0
    for _ in open_slots:
        pace.ended(end)
    assert pace.free(end) >= 1, "it never stops for good"


@dataclass
class Engine:
    """Runs some lines at a time, lets some wait, and refuses others until half of those are gone."""

    runs: int
    waits: int
    seconds: float
    running: list[tuple[float, int]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    done: int = 0

    def take(self, number: int, now: float) -> float | None:
        """Return None if the line is taken, otherwise Retry-After."""
        if len(self.running) < self.runs:
            heapq.heappush(self.running, (now + self.seconds, number))
        elif len(self.queue) < self.waits:
            self.queue.append(number)
        else:
            rate = self.runs / self.seconds
            return float(max(1, math.ceil(self.waits / 2 / rate)))
        return None

    def finish(self) -> tuple[float, int]:
        """End the next line."""
        now, number = heapq.heappop(self.running)
        self.done += 1
        if self.queue:
            heapq.heappush(self.running, (now + self.seconds, self.queue.popleft()))
        return now, number


@pytest.mark.parametrize(
    ("runs", "waits", "seconds"), [(64, 64, 10.0), (16, 32, 2.0), (200, 16, 30.0), (128, 256, 1.0)]
)
def test_an_engine_that_refuses_is_kept_busy(runs: int, waits: int, seconds: float) -> None:
    """At least 85% of what an unlimited client gets, from the first second on."""
    engine, pace, numbers = Engine(runs, waits, seconds), Pace(256), itertools.count()
    open_slots: dict[int, Slot] = {}
    now, end = 0.0, 60 * seconds
    while now < end:
        for slot in fill(pace, now):
            number = next(numbers)
            retry_after = engine.take(number, now)
            if retry_after is None:
                open_slots[number] = slot
            else:
                refuse(slot, now, retry_after)
        wakes = pace.wakes(now)
        if engine.running and engine.running[0][0] <= wakes:
            now, number = engine.finish()
            answer(open_slots.pop(number), now)
        else:
            assert math.isfinite(wakes)
            now = max(wakes, now + 0.001)
    unlimited = runs * (end / seconds)
    assert engine.done / unlimited >= 0.85, f"{engine.done} of {unlimited:g}"


def test_a_service_that_answers_nothing_for_five_minutes_gets_no_new_lines_and_half_the_places() -> (
    None
):
    pace = Pace(256)
    pace.limit = 200.0
    first, second, *_ = fill(pace, 0.0)
    assert pace.rests(299.0) == 0.0
    assert pace.rests(300.0) == math.inf
    assert pace.free(300.0) == 0
    assert pace.limit == 128.0
    answer(first, 400.0)
    assert pace.rests(400.0) == 0.0
    assert pace.free(400.0) == 0, "more than half still run"
    refuse(second, 401.0, None)
    assert 0.0 < pace.rests(401.0) < 300.0, "a refusal is an answer too"


def test_a_service_for_which_nothing_runs_is_not_silent() -> None:
    pace = Pace(256)
    pace.slot(0.0)
    pace.ended(1.0)
    assert pace.free(1000.0) == 32
    fill(pace, 1000.0)
    assert pace.rests(1200.0) == 0.0


def test_a_route_stays_until_its_first_line_is_sent() -> None:
    paces = Paces(100)
    paces.of("a").flows.add("key/model")
    paces.forget(1000.0)
    paces.forget(1600.0)
    assert paces.of("a").flows == {"key/model"}
    paces.forget(1601.0)
    assert not paces.all(), "none was sent"


def test_routes_are_forgotten_when_nothing_ran_for_long() -> None:
    paces = Paces(100)
    for name in "ab":
        paces.of(name).slot(0.0)
    paces.of("b").ended(0.0)
    paces.forget(1000.0)
    assert list(paces.all()) == ["a"], "one that is running stays"
    paces.of("a").ended(1000.0)
    paces.forget(1500.0)
    assert list(paces.all()) == ["a"]
    paces.forget(1601.0)
    assert not paces.all()
