"""The control breaker: every cause, the trial, and that every state is left again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.rules.control_breaker import (
    ControlBreaker,
    Evidence,
    Worse,
    decide_control_breaker,
)
from fleetkeeper.autoscale.types import Limits
from tests.support.autoscale.control_cases import NOW
from tests.support.lanes import examples

CLOSED, OPEN, HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
GOOD = Evidence(limits=Limits(64, 2048))
BEFORE = Limits(48, 512)


CAUSES = [
    ("SignalsLost", [replace(GOOD, blind=True)] * 3),
    ("ActuatorFailed", [replace(GOOD, failed_acts=1)] * 3),
    ("LimitsNotInEffect", [replace(GOOD, limits_late_s=121.0)]),
    ("ReplicasNotInEffect", [replace(GOOD, replicas_late_s=121.0)]),
    ("Oscillating", [replace(GOOD, reversals=(NOW - 400, NOW - 300, NOW - 200, NOW - 100))]),
    ("WorseAfterChange", [replace(GOOD, worse=Worse(0.05, BEFORE))]),
    ("StepTimeModelInaccurate", [replace(GOOD, model_off_windows=5)]),
]


def ticked(
    evidence: list[Evidence], breaker: ControlBreaker | None = None, now: float = NOW
) -> ControlBreaker:
    """The control breaker after ticks of 5 s."""
    current = breaker or ControlBreaker()
    for row in evidence:
        current = decide_control_breaker(current, row, now)
        now += 5
    return current


@pytest.mark.promise("last-known-good")
@pytest.mark.parametrize(("reason", "evidence"), CAUSES, ids=[row[0] for row in CAUSES])
def test_each_cause_opens_the_control_breaker(reason: str, evidence: list[Evidence]) -> None:
    """And is its reason."""
    breaker = ticked(evidence)
    assert breaker.state is OPEN
    assert breaker.reason == reason
    assert breaker.detail


def test_a_raise_that_made_things_worse_is_taken_back() -> None:
    """The limits before the raise are better known than older ones and than start-up values."""
    long_ago = Limits(16, 256)
    worse = replace(GOOD, worse=Worse(0.3, BEFORE))
    assert ticked([worse]).last_good == BEFORE
    assert ticked([worse], ControlBreaker(last_good=long_ago)).last_good == BEFORE
    hardly_worse = replace(GOOD, worse=Worse(0.04, BEFORE))
    assert ticked([hardly_worse]).last_good is None
    failing = replace(worse, failed_acts=1)
    assert ticked([replace(GOOD, failed_acts=1)] * 2 + [failing]).reason == "ActuatorFailed"
    assert ticked([replace(GOOD, failed_acts=1)] * 2 + [failing]).last_good == BEFORE


def test_limits_that_oscillate_stay() -> None:
    """Start-up values, or limits from long ago, would be another change of direction."""
    oscillates = replace(GOOD, reversals=(NOW - 400, NOW - 300, NOW - 200, NOW - 100))
    assert ticked([oscillates]).last_good == GOOD.limits
    long_ago = ControlBreaker(last_good=Limits(16, 256))
    assert ticked([oscillates], long_ago).last_good == GOOD.limits
    assert ticked([replace(GOOD, limits_late_s=121.0)], long_ago).last_good == Limits(16, 256)


NOT_CAUSES = [
    ("two blind ticks", [replace(GOOD, blind=True)] * 2),
    (
        "blind, then not",
        [replace(GOOD, blind=True)] * 2 + [GOOD] + [replace(GOOD, blind=True)] * 2,
    ),
    ("two failures", [replace(GOOD, failed_acts=1)] * 2),
    ("failures far apart", ([replace(GOOD, failed_acts=1)] + [GOOD] * 35) * 4),
    ("late, not long", [replace(GOOD, limits_late_s=120.0)] * 5),
    ("three reversals", [replace(GOOD, reversals=(NOW, NOW, NOW))]),
    ("old reversals", [replace(GOOD, reversals=(NOW - 1000, NOW - 950, NOW - 920, NOW - 901))]),
    ("a little worse", [replace(GOOD, worse=Worse(0.04, BEFORE))]),
    ("better", [replace(GOOD, worse=Worse(-0.5, BEFORE))]),
    ("off for a while", [replace(GOOD, model_off_windows=4)]),
]


@pytest.mark.parametrize(("case", "evidence"), NOT_CAUSES, ids=[row[0] for row in NOT_CAUSES])
def test_less_does_not_open_it(case: str, evidence: list[Evidence]) -> None:
    """Just below each threshold."""
    assert ticked(evidence).state is CLOSED


@pytest.mark.parametrize(("reason", "evidence"), CAUSES, ids=[row[0] for row in CAUSES])
def test_it_recovers_from_every_cause(reason: str, evidence: list[Evidence]) -> None:
    """120 s open, 3 ticks of comparing, 5 good ticks of probing, closed."""
    breaker, now, probed = ticked(evidence), NOW + 5 * len(evidence), False
    states = []
    for _ in range(40):
        breaker = decide_control_breaker(breaker, GOOD, now)
        states.append(breaker.state)
        probed = probed or breaker.probes
        now += 5
    assert states[0] is OPEN
    assert HALF in states
    assert states[-1] is CLOSED
    assert probed
    assert states.count(HALF) == 3 + 5


def test_it_stays_open_while_there_is_nothing_to_see() -> None:
    """Signals lost for an hour: open, not half-open, for an hour."""
    blind = replace(GOOD, blind=True)
    breaker = ticked([blind] * 720)
    assert breaker.state is OPEN


def test_a_bad_trial_opens_it_for_twice_as_long() -> None:
    """120, 240, 480, 960, 1800 s."""
    breaker, now, waits = ticked(CAUSES[2][1]), NOW + 5, []
    for _ in range(6):
        waits.append(breaker.wait_s)
        while breaker.state is OPEN:
            breaker = decide_control_breaker(breaker, GOOD, now)
            now += 5
        breaker = decide_control_breaker(breaker, replace(GOOD, limits_late_s=500.0), now)
        now += 5
    assert waits == [120, 240, 480, 960, 1800, 1800]


@pytest.mark.promise("last-known-good")
def test_limits_attained_for_ten_minutes_are_the_last_known_good() -> None:
    """And not before; a change of limits begins anew."""
    good = replace(GOOD, attained=True)
    breaker = ticked([good] * 119)
    assert breaker.last_good is None
    breaker = ticked([good] * 5, breaker, NOW + 5 * 119)
    assert breaker.last_good == Limits(64, 2048)
    other = replace(good, limits=Limits(70, 2048))
    assert ticked([other] * 60, breaker, NOW + 700).last_good == Limits(64, 2048)


evidences = st.builds(
    Evidence,
    blind=st.booleans(),
    failed_acts=st.integers(0, 3),
    limits_late_s=st.floats(0, 300),
    replicas_late_s=st.floats(0, 300),
    worse=st.none() | st.builds(Worse, st.floats(-1, 1)),
    model_off_windows=st.integers(0, 6),
    attained=st.booleans(),
    limits=st.just(Limits(64, 2048)),
)


@given(st.lists(evidences, min_size=1, max_size=120))
@examples(100)
def test_every_control_state_is_left_again(rows: list[Evidence]) -> None:
    """After any history, good evidence closes it within the longest wait and eight ticks."""
    breaker, now = ticked(rows), NOW + 5 * len(rows)
    for _ in range(1800 // 5 + 20):
        breaker = decide_control_breaker(breaker, GOOD, now)
        now += 5
    assert breaker.state is CLOSED
