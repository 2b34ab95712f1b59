"""Progress, hangs and readiness of an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.step_terms import TERMS
from fleetkeeper_engine.shm.layout import HeartbeatBlock, MiddlewareBlock, SchedulerBlock
from fleetkeeper_engine.supervisor.health import (
    NO_STEP,
    PRIOR_TOKEN_S,
    Progress,
    Readiness,
    decide_progress,
    is_live,
    is_moving,
    stalled_s,
)

Engine = tuple[SchedulerBlock, HeartbeatBlock]


def scheduler(
    calls: int = 0,
    steps: int = 0,
    running: int = 0,
    flight_steps: int = 0,
    flight_tokens: int = 0,
    **more: object,
) -> Engine:
    block = SchedulerBlock(worked_steps=steps, running=(0, running, 0))
    heartbeat = HeartbeatBlock(calls, flight_steps, flight_tokens)
    return replace(block, **more), heartbeat  # type: ignore[arg-type]


def observed(*observations: tuple[float, Engine, MiddlewareBlock | None]) -> Progress:
    progress = Progress()
    for now, inside, outside in observations:
        progress = decide_progress(progress, *inside, outside, now)
    return progress


def test_an_idle_engine_is_never_stalled() -> None:
    """An idle core never calls schedule."""
    progress = observed((0.0, scheduler(10, 10), MiddlewareBlock()))
    assert stalled_s(progress, 1e6) == 0.0
    assert is_live(progress, 1e6, 60.0)


def test_work_without_a_schedule_call_is_a_hang_after_the_stall_time() -> None:
    progress = observed((0.0, scheduler(10, 10, 4), None), (1.0, scheduler(11, 11, 4), None))
    assert is_moving(progress, 10.9, 60.0)
    assert not is_moving(progress, 11.1, 60.0)
    assert is_live(progress, 60.9, 60.0)
    assert not is_live(progress, 61.1, 60.0)


def test_schedule_calls_without_a_worked_step_are_a_wedge() -> None:
    observations = [(float(t), scheduler(10 + t, 10, 4), None) for t in range(62)]
    progress = observed(*observations)
    assert not is_live(progress, 61.0, 60.0)


def test_an_engine_in_which_our_code_never_came_up_is_never_called_stalled() -> None:
    """Only the middleware speaks: its requests are answered, and nobody counts them inside."""
    released = MiddlewareBlock(released=(0, 4, 0))
    progress = Progress()
    for t in range(0, 900, 5):
        progress = decide_progress(progress, None, HeartbeatBlock(), released, float(t))
    assert is_live(progress, 900.0, 60.0)
    assert is_moving(progress, 900.0, 60.0)


def test_an_engine_that_goes_on_without_our_code_is_never_called_stalled() -> None:
    """A fault of ours must not end an engine that works: its counters stand still, its requests do not."""
    instrumentation_disabled = scheduler(10, 10, 4, instrumentation_disabled=True)
    released = MiddlewareBlock(released=(0, 4, 0))
    progress = observed(
        (0.0, scheduler(10, 10, 4), released), (1.0, instrumentation_disabled, released)
    )
    progress = decide_progress(progress, *instrumentation_disabled, released, 600.0)
    assert is_live(progress, 600.0, 60.0)
    assert is_moving(progress, 600.0, 60.0)


def test_requests_held_back_above_the_memory_cap_are_no_wedge() -> None:
    """Schedule is called and schedules nothing, as required; once they may start the clock begins anew."""
    progress = Progress()
    for t in range(600):
        block = scheduler(10 + t, 10, waiting=(0, 3, 0))
        progress = decide_progress(progress, *block, None, float(t), throttled=True)
        assert is_moving(progress, float(t), 60.0)
    let_go = decide_progress(progress, *scheduler(700, 10, waiting=(0, 3, 0)), None, 600.0)
    assert is_live(let_go, 658.0, 60.0)
    wedged = decide_progress(let_go, *scheduler(800, 10, waiting=(0, 3, 0)), None, 661.0)
    assert not is_live(wedged, 661.0, 60.0)


@pytest.mark.parametrize(
    "running", [{"running": 1}, {"flight_steps": 1}], ids=["running", "in flight"]
)
def test_above_the_memory_cap_what_runs_must_still_move(running: dict[str, int]) -> None:
    """The cap stops new sequences only."""
    progress = Progress()
    for t in range(62):
        block = scheduler(10 + t, 10, waiting=(0, 3, 0), **running)
        progress = decide_progress(progress, *block, None, float(t), throttled=True)
    assert not is_live(progress, 61.0, 60.0)


def test_above_the_memory_cap_a_core_that_stops_scheduling_is_a_hang() -> None:
    """Waiting requests keep a sound core calling schedule, whatever may start."""
    progress = Progress()
    for t in range(62):
        block = scheduler(10, 10, waiting=(0, 3, 0))
        progress = decide_progress(progress, *block, None, float(t), throttled=True)
    assert not is_live(progress, 61.0, 60.0)


def test_a_request_that_never_reached_the_core_counts_as_work() -> None:
    """The core was stopped while idle: only the middleware knows of the request."""
    released = MiddlewareBlock(released=(0, 1, 0))
    progress = observed(
        (100.0, scheduler(10, 10), MiddlewareBlock()), (200.0, scheduler(10, 10), released)
    )
    assert is_live(progress, 259.0, 60.0)
    assert not is_live(progress, 261.0, 60.0)


def test_the_clock_of_a_stall_starts_with_the_work_not_with_the_last_step() -> None:
    progress = observed(
        (0.0, scheduler(10, 10), None),
        (5000.0, scheduler(10, 10, 1), None),
    )
    assert stalled_s(progress, 5003.0) == pytest.approx(3.0)


def test_a_long_prefill_in_flight_is_no_stall() -> None:
    """2048 tokens at the 40 ms that a token took so far may last 4 x 82 s; at 20 ms before any was seen, 4 x 41 s."""
    sums = prefilled(tokens=1000, seconds=40.0)
    known = observed((0.0, scheduler(10, 10, 1, 1, 2048, step_model=sums), None))
    assert is_live(known, 300.0, 60.0)
    assert is_moving(known, 300.0, 60.0)
    assert not is_live(known, 330.0, 60.0)
    unknown = observed((0.0, scheduler(10, 10, 1, 1, 2048), None))
    assert is_live(unknown, 4 * 2048 * PRIOR_TOKEN_S - 1, 60.0)


def test_the_pace_of_the_first_steps_does_not_delay_a_verdict() -> None:
    """They compile, and take seconds for a few tokens: 2 s for each here, 0.01 s later."""
    warm_up, served = prefilled(tokens=4, seconds=8.0), prefilled(tokens=24, seconds=8.2)
    progress = Progress()
    for now, started, block in (
        (0.0, False, scheduler(2, 2, step_model=warm_up)),
        (1.0, True, scheduler(2, 2, step_model=warm_up)),
        (2.0, True, scheduler(9, 8, 8, 1, 8, step_model=served)),
    ):
        progress = decide_progress(progress, *block, None, now, started=started)
    assert progress.allowance_s < 1.0
    assert not is_moving(progress, 12.1, 60.0)


def prefilled(*, tokens: float, seconds: float) -> tuple[float, ...]:
    """Return step sums with so many prefill tokens and seconds of prefill-bearing steps."""
    sums = [0.0] * (2 * len(TERMS))
    sums[len(TERMS) + TERMS.index("prefill")] = tokens
    sums[len(TERMS) + TERMS.index("seconds")] = seconds
    return tuple(sums)


def test_a_region_that_cannot_be_read_changes_nothing() -> None:
    before = observed((0.0, scheduler(10, 10, 4), None))
    assert decide_progress(before, None, HeartbeatBlock(), None, 5.0) == before


@given(
    st.lists(
        st.tuples(st.floats(0.01, 5.0), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)),
        max_size=60,
    )
)
def test_progress_within_the_stall_time_is_never_called_dead(
    ticks: list[tuple[float, int, int, int]],
) -> None:
    """Whatever moves: with at least one call and one step each 5 s the engine is live."""
    progress, now, calls, steps = Progress(), 0.0, 0, 0
    for pause, more_calls, more_steps, work in ticks:
        now += pause
        calls += max(1, more_calls)
        steps += max(1, more_steps)
        progress = decide_progress(progress, *scheduler(calls, steps, work), None, now)
        assert is_live(progress, now, 5.0 + 1e-6)


def test_readiness_names_every_obstacle() -> None:
    good = Readiness(started=True, cap="", draining=False, hang="", child_alive=True)
    assert good.obstacles == ()
    bad = Readiness(started=False, cap="not armed", draining=True, hang=NO_STEP, child_alive=False)
    assert len(bad.obstacles) == 5
    assert "not armed" in bad.obstacles
