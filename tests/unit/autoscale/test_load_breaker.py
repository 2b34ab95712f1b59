"""The load breaker: every transition of every tier, and that every state is left again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.constants import LOAD_OPEN_S, WARM_UP_S
from fleetkeeper.autoscale.rules.load_breaker import (
    LoadBreaker,
    admission_of,
    decide_load_breaker,
    pressure,
    rejected_ratio,
)
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Grade
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import NOW
from tests.support.lanes import examples

CLOSED, OPEN, HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SETTINGS = ControlSettings()


def loaded(
    x: float,
    *,
    served: float = 4.0,
    offered: float = 10.0,
    oldest_realtime_s: float = 0.0,
    preemptions: float = 0.0,
    batch: float = 1.0,
    waiting: float = 3.0,
) -> Signals:
    """Signals with pressure x by queue wait, and a short queue."""
    return Signals(
        Grade.FRESH,
        1.0,
        2,
        2,
        rates=Counters(
            wait_count_standard=served,
            arrivals_standard=offered,
            preemptions=preemptions,
            arrivals_realtime=offered,
            wait_count_realtime=served,
            arrivals_batch=batch,
        ),
        gauges=Gauges(
            running=50, oldest_wait_s_realtime=oldest_realtime_s, waiting_standard=waiting
        ),
        queue_wait_s=0.5 * x,
    )


def played(
    xs: list[float], breaker: LoadBreaker | None = None, now: float = NOW, **changes: float
) -> list[LoadBreaker]:
    """The breaker after each tick."""
    current, out = breaker or LoadBreaker(), []
    for x in xs:
        current = decide_load_breaker(loaded(x, **changes), SETTINGS, 100.0, current, now)
        out.append(current)
        now += 5.0
    return out


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"queue_wait_s": 0.4, "batch_time_s": 0.03, "kv_ratio": 0.5}, 0.8),
        ({"queue_wait_s": 0.1, "batch_time_s": 0.06}, 1.2),
        ({"kv_ratio": 0.95}, 1.0),
        ({"waiting": 100.0}, 0.5),
        ({}, 0.0),
        ({"queue_wait_s": 50.0}, 100.0),
    ],
)
def test_pressure_is_the_worst_of_four(change: dict[str, float], want: float) -> None:
    """W, B, KV and Q against capacity."""
    seen = Signals(Grade.FRESH, 1.0, 2, 2)
    assert pressure(replace(seen, **change), SETTINGS, 100.0) == pytest.approx(want)  # type: ignore[arg-type]


@pytest.mark.parametrize(("waiting", "opens"), [(0.0, False), (1.0, True)])
def test_batch_opens_only_if_there_are_batch_requests(waiting: float, opens: bool) -> None:
    """Without any, an open tier protects no request, and is a warning that explains nothing."""
    current = LoadBreaker()
    for tick in range(4):
        seen = loaded(4.0, batch=0.0, preemptions=2.0)
        seen = replace(seen, gauges=seen.gauges._replace(waiting_batch=waiting))
        current = decide_load_breaker(seen, SETTINGS, 100.0, current, NOW + 5 * tick)
    assert (current.batch.state is OPEN) is opens


@pytest.mark.parametrize(
    ("served", "offered", "waiting", "want"),
    [
        (4.0, 10.0, 0.0, 0.64),
        (4.0, 10.0, 60.0, 0.84),
        (4.0, 10.0, 6000.0, 0.95),
        (10.0, 10.0, 0.0, 0.1),
        (10.0, 10.0, 30.0, 0.2),
        (20.0, 10.0, 0.0, 0.0),
        (20.0, 10.0, 300.0, 0.2),
        (0.0, 10.0, 0.0, 0.95),
        (0.0, 0.1, 60.0, 0.0),
        (1.0, 0.66, 60.0, 0.0),
    ],
)
def test_rejected_share(served: float, offered: float, waiting: float, want: float) -> None:
    """1 - (0.9 served - waiting / 30 s) / offered, from 0 to 0.95; never on fewer than 20 requests."""
    assert rejected_ratio(served, offered, waiting) == pytest.approx(want)


@pytest.mark.promise("shed-order")
def test_batch_opens_after_two_ticks() -> None:
    """One tick above 0.9 is noise."""
    states = [b.batch.state for b in played([0.95, 0.5, 0.95, 0.95])]
    assert states == [CLOSED, CLOSED, CLOSED, OPEN]


def test_a_breaker_that_sees_nothing_closes() -> None:
    """Live traffic is not shed because a scrape failed."""
    current = played([4.0] * 14)[-1]
    silent = Signals(ready_pods=2, warmed_up_pods=2)
    assert decide_load_breaker(silent, SETTINGS, 100.0, current, NOW + 75).is_closed


def test_replicas_that_are_warming_up_keep_the_breaker_as_it_is() -> None:
    """They are judged within a minute: until then tiers stay as they were, and not for longer than their time."""
    current = played([4.0] * 14)[-1]
    opened = {tier: breaker.since for tier, breaker in current.by_tier().items()}
    warming_up, states = Signals(ready_pods=1), []
    for second in range(70, 400, 5):
        current = decide_load_breaker(warming_up, SETTINGS, 100.0, current, NOW + second)
        states.append((NOW + second, current))
    for now, breaker in states:
        for tier, of_tier in breaker.by_tier().items():
            if tier != Tier.REALTIME.label:
                is_due = now - opened[tier] >= LOAD_OPEN_S[0] + WARM_UP_S
                assert of_tier.state is (CLOSED if is_due else OPEN)
    assert current.is_closed
    assert states[-1][1] is states[-2][1], "nothing moves once it is closed"


@pytest.mark.promise("shed-order")
def test_standard_opens_after_batch_was_open_for_thirty_seconds() -> None:
    """Three ticks above 3.0 from then on, and its admission moves by at most 0.3 a tick."""
    states = played([4.0] * 14)
    opened = next(i for i, b in enumerate(states) if b.standard.state is OPEN)
    batch_opened = next(i for i, b in enumerate(states) if b.batch.state is OPEN)
    assert (opened - batch_opened) * 5 >= 30
    assert (opened - batch_opened) * 5 <= 45
    admits = [b.standard.admit for b in states]
    assert all(abs(b - a) <= 0.3 + 1e-9 for a, b in itertools.pairwise(admits))
    assert admits[-1] < 1.0


def test_standard_does_not_wait_for_batch_if_none_arrives() -> None:
    """Shedding batch requests cannot be enough then: the third tick opens standard."""
    states = played([4.0] * 8, batch=0.0)
    assert [b.standard.state for b in states[:3]] == [CLOSED, CLOSED, OPEN]
    assert [round(b.standard.admit, 2) for b in states[2:6]] == [0.7, 0.4, 0.35, 0.35]


def test_more_is_shed_while_a_queue_has_to_drain() -> None:
    """Of 10/s, 3.6 can be admitted; 60 that wait take 2 of them for half a minute."""
    assert played([4.0] * 8, batch=0.0, waiting=60.0)[-1].standard.admit == pytest.approx(0.16)


@pytest.mark.parametrize(("waiting", "sheds"), [(0.0, False), (2.0, False), (2.1, True)])
def test_nothing_is_shed_once_who_comes_now_waits_within_the_objective(
    waiting: float, sheds: bool
) -> None:
    """Of 4/s that are served, 2 waiting ones take 0.5 s, however long those of the last 30 s waited."""
    assert (played([4.0] * 8, batch=0.0, waiting=waiting)[-1].standard.admit < 1.0) is sheds


def test_an_admission_rises_as_soon_as_the_queue_is_gone() -> None:
    """By 0.1 a tick, while queue wait, a mean of 30 s, is still eight times its objective."""
    opened = played([8.0] * 6, batch=0.0)[-1]
    after = played([8.0] * 2, opened, NOW + 30, batch=0.0, waiting=1.0)
    assert [round(b.standard.admit - opened.standard.admit, 2) for b in after] == [0.1, 0.2]


def test_standard_never_opens_between() -> None:
    """Above batch's threshold, below its own."""
    assert all(b.standard.state is CLOSED for b in played([2.9] * 60))
    assert all(b.standard.state is CLOSED for b in played([2.9] * 60, batch=0.0))


@pytest.mark.parametrize(
    ("served", "offered"),
    [pytest.param(10.0, 4.0, id="the queue moves"), pytest.param(0.8, 0.6, id="hardly any come")],
)
def test_standard_opens_only_where_it_would_shed_something(served: float, offered: float) -> None:
    """After a surge the last requests of the queue have waited long, while nothing needs to be shed."""
    after = played([10.0] * 20, served=served, offered=offered)
    assert after[-1].batch.state is OPEN
    assert all(b.standard.state is CLOSED and b.standard.admit == 1.0 for b in after)


def test_standard_is_tried_again_once_nothing_would_be_shed() -> None:
    """Its waits may still be long then: they are those of the queue that is being worked off."""
    opened = played([4.0] * 14)[-1]
    assert opened.standard.state is OPEN
    after = played([4.0] * 8, opened, NOW + 70, served=10.0, offered=4.0)
    assert after[-1].standard.state is HALF


@pytest.mark.promise("shed-order")
def test_realtime_is_never_refused_for_load() -> None:
    """Pressure of 100 for ten minutes: only age opens it."""
    assert all(
        b.realtime.state is CLOSED and b.realtime.admit == 1.0 for b in played([100.0] * 120)
    )
    aged = played([100.0] * 20, oldest_realtime_s=31.0)
    assert aged[-1].realtime.state is OPEN
    assert aged[-1].realtime.admit >= 0.05


def test_batch_keeps_its_floor() -> None:
    """While open: 5% of arrivals and of sequences; share at most 30% when closed."""
    opened = played([3.0] * 4)[-1]
    admission = admission_of(opened, SETTINGS)
    assert admission.admit[2] == 0.05
    assert admission.batch_share == 0.05
    assert admission_of(LoadBreaker(), SETTINGS).batch_share == 0.3
    nothing = ControlSettings(batch_floor_ratio=0.0)
    none_left = decide_load_breaker(loaded(3.0), nothing, 100.0, played([3.0])[-1], NOW + 5)
    assert admission_of(none_left, nothing).admit[2] == 0.0


def test_half_open_doubles_each_clean_tick_and_closes_after_three() -> None:
    """10%, 20%, 40%, closed; not before 30 s."""
    opened = played([3.0] * 2)[-1]
    after = played([0.3] * 12, opened, NOW + 10)
    states = [b.batch.state for b in after]
    first = states.index(HALF)
    assert first * 5 >= 25
    assert [round(b.batch.admit, 2) for b in after[first : first + 4]] == [0.1, 0.2, 0.4, 1.0]
    assert states[first + 3] is CLOSED


def test_a_failed_trial_waits_twice_as_long() -> None:
    """30, 60, 120, 240, 300 s."""
    breaker, now, waits = played([3.0] * 2)[-1], NOW + 10, []
    for _ in range(6):
        waits.append(breaker.batch.wait_s)
        while breaker.batch.state is OPEN:
            breaker = decide_load_breaker(loaded(0.8), SETTINGS, 100.0, breaker, now)
            now += 5
        breaker = decide_load_breaker(loaded(3.0), SETTINGS, 100.0, breaker, now)
        assert breaker.batch.state is OPEN
        now += 5
    assert waits == [30, 60, 120, 240, 300, 300]


def test_fewer_than_twenty_requests_are_not_judged() -> None:
    """A slow night is no overload."""
    quiet = loaded(5.0, served=0.1, offered=0.2, batch=0.0)
    breaker = LoadBreaker()
    for i in range(30):
        breaker = decide_load_breaker(quiet, SETTINGS, 100.0, breaker, NOW + 5 * i)
    assert breaker.is_closed


def test_silence_closes_the_load_breaker() -> None:
    """Live traffic is never shed because metrics are missing."""
    opened = played([4.0] * 14)[-1]
    blind = decide_load_breaker(Signals(), SETTINGS, 100.0, opened, NOW + 100)
    assert blind.is_closed
    assert admission_of(blind, SETTINGS).admit == (1.0, 1.0, 1.0)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=100), st.floats(0, 20), st.floats(0, 40))
@examples(150)
def test_every_load_state_is_left_again(xs: list[float], served: float, offered: float) -> None:
    """After any history, calm closes every tier within the longest wait and four ticks."""
    breaker = played(xs, served=served, offered=offered)[-1]
    now = NOW + 5 * len(xs)
    for _ in range(300 // 5 + 10):
        breaker = decide_load_breaker(loaded(0.2), SETTINGS, 100.0, breaker, now)
        for tier in breaker.by_tier().values():
            assert 0.0 <= tier.admit <= 1.0
        now += 5
    assert breaker.is_closed
