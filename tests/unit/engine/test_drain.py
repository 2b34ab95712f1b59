"""The phases of a drain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_engine.supervisor.drain import DrainClock, DrainPhase, decide_drain


@given(
    seconds=st.floats(0, 600),
    notice=st.floats(0, 60),
    busy_until=st.floats(0, 1200),
)
def test_a_drain_always_ends_never_early_and_never_late(
    seconds: float, notice: float, busy_until: float
) -> None:
    """Nothing is stopped while work runs before the deadline, and at the deadline everything is."""
    clock = DrainClock(1000.0, seconds, notice)
    phases: list[DrainPhase] = []
    now = 1000.0
    while now <= clock.deadline + 0.5:
        unfinished = int(now - 1000.0 < busy_until)
        phase = decide_drain(clock, unfinished=unfinished, stop_sent=None, now=now)
        if phase is DrainPhase.STOPPING:
            assert not unfinished or now >= clock.deadline
            break
        assert not phases or phases[-1] in {phase, DrainPhase.NOTICE}
        phases.append(phase)
        now += 0.25
    else:
        pytest.fail("the drain did not end by its deadline")
    assert decide_drain(clock, unfinished=1, stop_sent=now, now=now + 9.9) is DrainPhase.STOPPING
    assert decide_drain(clock, unfinished=1, stop_sent=now, now=now + 10.0) is DrainPhase.KILLING


def test_a_drain_of_120_s_gives_routers_5_s_first() -> None:
    clock = DrainClock(0.0, 120.0, 5.0)
    assert decide_drain(clock, unfinished=0, stop_sent=None, now=4.9) is DrainPhase.NOTICE
    assert decide_drain(clock, unfinished=3, stop_sent=None, now=5.1) is DrainPhase.CLOSING
    assert decide_drain(clock, unfinished=0, stop_sent=None, now=5.6) is DrainPhase.STOPPING
    assert DrainClock(0.0, 2.0, 5.0).notice_ends == 0.5
