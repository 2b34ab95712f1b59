"""Batch limits: marks, modes and bounds, and what always holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.rules.batch.decide import decide_limits, direction
from fleetkeeper.autoscale.rules.batch.raises import step_up_possible
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, start_up
from fleetkeeper.autoscale.rules.objectives import (
    batch_time_is_near,
    has_room,
    high_mark,
    is_slow,
    low_mark,
    refuses,
    wait_is_broken,
    wait_is_near,
    wait_lasts,
)
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Limits
from tests.support.autoscale.batch_cases import (
    HELD,
    MEMORY,
    SETTINGS,
    decided,
    signals,
    window,
    windows,
)
from tests.support.autoscale.control_cases import NOW
from tests.support.lanes import examples


@pytest.mark.parametrize(
    ("percent", "low", "high"),
    [
        (95, 0.97, 0.995),
        (90, 0.92, 0.945),
        (99, 0.999, 0.999),
        (50, 0.52, 0.545),
        (97, 0.99, 0.999),
    ],
)
def test_marks_lie_above_the_objective(percent: int, low: float, high: float) -> None:
    """2 and 4.5 points above it, capped at 99.9%."""
    settings = ControlSettings(attainment_ratio=percent / 100)
    assert low_mark(settings) == pytest.approx(low)
    assert high_mark(settings) == pytest.approx(high)


@pytest.mark.parametrize(
    ("attained", "slow"),
    [
        ((0.96,), False),
        ((0.96, 0.96), True),
        ((0.96, 0.99), False),
        ((0.96, 0.99, 0.96), True),
        ((0.96, 0.96, 0.99), True),
        ((0.96, 0.99, 0.99), False),
        ((0.99, 0.96, 0.96, 0.99, 0.99), False),
        ((0.97, 0.97, 0.97), False),
        ((0.0, 0.0, 0.0), True),
        ((), False),
    ],
)
def test_slow_is_two_of_three_windows(attained: tuple[float, ...], slow: bool) -> None:
    """One bad window is noise."""
    assert is_slow(windows(*attained), SETTINGS) is slow


@pytest.mark.parametrize(
    ("attained", "room"),
    [
        ((0.999,) * 3, False),
        ((0.999,) * 4, True),
        ((0.999, 0.999, 0.994, 0.999), False),
        ((0.9, 0.999, 0.999, 0.999, 0.999), True),
        ((0.995,) * 4, True),
    ],
)
def test_room_is_four_windows(attained: tuple[float, ...], room: bool) -> None:
    """All of the last four."""
    assert has_room(windows(*attained), SETTINGS) is room


@pytest.mark.parametrize(
    ("wait_s", "waited", "broken"),
    [
        (0.4, 1.0, False),
        (0.5, 1.0, False),
        (0.51, 1.0, True),
        (0.4, 0.0, False),
        (10.0, 0.0, True),
    ],
)
def test_queue_wait_is_broken_above_its_objective(
    wait_s: float, waited: float, broken: bool
) -> None:
    """A window in which requests waited too long does not count if the wait of 30 s is short."""
    seen = signals(queue_wait_s=wait_s, windows=(window(waited=waited),))
    assert wait_is_broken(seen, SETTINGS) is broken


@pytest.mark.parametrize(
    ("waited", "lasts"),
    [
        ((0.0,) * 5, False),
        ((0.0,) * 6, True),
        ((0.74,) * 6, True),
        ((0.75,) * 6, False),
        ((0.0, 0.0, 0.0, 0.8, 0.0, 0.0), False),
        ((1.0, *(0.0,) * 6), True),
        ((), False),
    ],
)
def test_a_queue_lasts_if_a_quarter_of_the_requests_of_a_minute_waited(
    waited: tuple[float, ...], lasts: bool
) -> None:
    """In every one of six windows; one in which more were prompt shows that the queue drains."""
    seen = signals(queue_wait_s=0.6, windows=tuple(window(waited=each) for each in waited))
    assert wait_lasts(seen, SETTINGS) is lasts
    assert not wait_lasts(replace(seen, queue_wait_s=0.5), SETTINGS), "the objective is met"


@pytest.mark.parametrize(
    ("wait_s", "waiting", "lasts"),
    [(0.6, 40.0, False), (0.6, 41.0, True), (5.0, 3.0, False), (0.5, 100.0, False)],
)
def test_a_long_queue_needs_no_minute(wait_s: float, waiting: float, lasts: bool) -> None:
    """4 requests/s are served, so 40 take 20 objectives of 0.5 s. A mean wait of 30 s is no queue."""
    served = Counters(wait_count_standard=4.0)
    seen = signals(queue_wait_s=wait_s, waiting=waiting, rates=served)
    assert wait_lasts(seen, SETTINGS) is lasts


@pytest.mark.parametrize(
    ("arrivals", "served", "waiting", "refused"),
    [
        ((0, 20, 0), (0, 8, 0), 8, True),
        ((20, 0, 0), (8, 0, 0), 8, True),
        ((0, 11.2, 0), (0, 8, 0), 8, True),
        ((0, 10.9, 0), (0, 8, 0), 8, False),
        ((0, 20, 0), (0, 8, 0), 0, False),
        ((0, 20, 0), (0, 8, 0), 360, False),
        ((0, 0.8, 0), (0, 0.2, 0), 1, False),
        ((0, 8, 20), (0, 8, 0), 8, False),
    ],
    ids=[
        "refused",
        "refused realtime",
        "just a long queue",
        "not yet",
        "none waits",
        "all wait",
        "few",
        "only batch",
    ],
)
def test_refused_requests_would_have_been_a_queue(
    arrivals: tuple[float, ...], served: tuple[float, ...], waiting: float, refused: bool
) -> None:
    """8 requests/s are served, so 80 would take 20 objectives of 0.5 s."""
    rates = Counters(
        wait_count_realtime=served[0],
        wait_count_standard=served[1],
        wait_count_batch=served[2],
        arrivals_realtime=arrivals[0],
        arrivals_standard=arrivals[1],
        arrivals_batch=arrivals[2],
    )
    assert refuses(signals(rates=rates, waiting=waiting), SETTINGS) is refused


def test_a_queue_does_not_last_in_a_window_without_requests() -> None:
    """A silent histogram shows nothing."""
    silent = replace(window(waited=0.0), requests=0.0, waited_within=0.0)
    seen = signals(queue_wait_s=0.6, windows=(silent, *(window(waited=0.0),) * 5))
    assert not wait_lasts(seen, SETTINGS)


@pytest.mark.parametrize(
    ("batch_time_s", "wait_s", "near"),
    [
        (0.034, 0.12, (False, False)),
        (0.035, 0.0, (True, False)),
        (0.0, 0.13, (False, True)),
        (0.0, 0.0, (False, False)),
    ],
)
def test_an_objective_is_near(batch_time_s: float, wait_s: float, near: tuple[bool, bool]) -> None:
    """Batch time from 0.7 of 50 ms, and queue wait above a quarter of 500 ms."""
    seen = signals(batch_time_s=batch_time_s, queue_wait_s=wait_s)
    assert (batch_time_is_near(seen, SETTINGS), wait_is_near(seen, SETTINGS)) == near


@pytest.mark.parametrize(
    ("low", "high", "low_tokens", "high_tokens"),
    [(4, 256, 256, 8192), (1, 1, 64, 64), (8, 8, 256, 256), (1, 1024, 256, 2048)],
)
def test_limits_start_at_the_start_up_values(
    low: int, high: int, low_tokens: int, high_tokens: int
) -> None:
    """Those with which the engine starts: nothing is lowered before something is measured."""
    settings = ControlSettings(
        min_sequences=low, max_sequences=high, min_tokens=low_tokens, max_tokens=high_tokens
    )
    started = decided(BatchView(Signals(), settings), BatchMemory())
    assert started == (Limits(high, high_tokens), "Starting")


def test_fixed_keeps_start_up_values() -> None:
    """Nothing is tuned."""
    fixed = ControlSettings(batching_mode=BatchingMode.FIXED)
    assert decided(BatchView(signals(), fixed)) == (start_up(fixed), "Fixed")


def test_stale_signals_change_no_limit() -> None:
    """An unchanged decision keeps the limits in force."""
    decision, memory = decide_limits(BatchView(Signals(), SETTINGS), MEMORY, NOW)
    assert not decision.valid
    assert decision.value == HELD
    assert memory.limits == HELD


@pytest.mark.parametrize(
    ("attained", "limits", "may_raise", "possible"),
    [
        (0.999, HELD, True, True),
        (0.99, HELD, True, False),
        (0.999, Limits(256, 8192), True, False),
        (0.999, Limits(256, 2048), True, True),
        (0.999, HELD, False, False),
    ],
)
def test_batch_at_its_limit_means_no_step_up(
    attained: float, limits: Limits, may_raise: bool, possible: bool
) -> None:
    """Attainment below 99.5%, or both at their ceilings."""
    view = BatchView(signals(windows=windows(*[attained] * 4)), SETTINGS, may_raise=may_raise)
    assert step_up_possible(view, replace(MEMORY, limits=limits)) is possible


ratios = st.floats(0, 1)


@given(
    st.lists(
        st.tuples(
            ratios,
            st.floats(0, 5),
            st.floats(0, 0.3),
            ratios,
            st.floats(0, 600),
            st.integers(0, 3),
            st.booleans(),
            st.floats(0, 2),
        ),
        min_size=5,
        max_size=60,
    ),
    st.integers(1, 64),
    st.integers(64, 1024),
)
@examples(150)
def test_limits_never_leave_their_bounds(rows: list[tuple], low: int, high: int) -> None:  # type: ignore[type-arg]
    """For any measurements: within [floor, start-up], at most one change in 10 s down, 30 s up."""
    bounds = ControlSettings(min_sequences=low, max_sequences=high, min_tokens=256, max_tokens=4096)
    memory, now, before_change = BatchMemory(), NOW, None
    changes: list[tuple[float, int]] = []
    for attained, wait_s, step_s, kv, running, pending, may_raise, preemptions in rows:
        now += 5.0
        judged = tuple(
            replace(window(attained), start=now - 10 * (4 - i) - 10, end=now - 10 * (4 - i))
            for i in range(4)
        )
        seen = signals(
            windows=judged,
            queue_wait_s=wait_s,
            batch_time_s=step_s,
            kv_ratio_max=kv,
            gauges=Gauges(running=running),
            rates=Counters(preemptions=preemptions, prompt_tokens=running),
        )
        view = BatchView(seen, bounds, pending=pending, may_raise=may_raise)
        decision, memory = decide_limits(view, memory, now)
        limits = decision.value
        assert low <= limits.sequences <= high
        assert 256 <= limits.tokens <= 4096
        if before_change is not None and limits != before_change:
            changes.append((now, direction(before_change, limits)))
            assert may_raise or changes[-1][1] < 0
        before_change = limits
    for (before, _), (after, by) in itertools.pairwise(changes):
        assert after - before >= (30.0 if by > 0 else 10.0)
