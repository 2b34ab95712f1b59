"""The recommended number of replicas: scale-up, bounds and the stabilization window."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.rules.replicas import most_replicas_now, with_recommendation
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.types import ControlSettings, Grade
from fleetkeeper.common.activation import Activation, State
from tests.support.autoscale.control_cases import NOW
from tests.support.autoscale.replica_cases import BROKEN, SETTINGS, WAITS, decided, signals, view
from tests.support.lanes import examples


@pytest.mark.parametrize(
    ("recent", "replicas", "most"),
    [
        ([], 1, 5),
        ([], 4, 8),
        ([], 5, 10),
        ([(10, 3)], 5, 7),
        ([(15, 3)], 5, 10),
        ([(10, 1)], 5, 5),
        ([(14, 8)], 9, 16),
    ],
)
def test_up_by_four_or_double_in_15_seconds(
    recent: list[tuple[float, int]], replicas: int, most: int
) -> None:
    """Whichever is more, from the least of the last 15 s, as an HPA."""
    memory = ReplicasMemory(recent_replicas=tuple((NOW - ago, count) for ago, count in recent))
    assert most_replicas_now(memory, replicas, NOW) == most


@pytest.mark.promise("waits-replicas")
@pytest.mark.parametrize(
    ("case", "change", "want", "reason"),
    [
        ("broken, batch at its limit", {**BROKEN, "signals": WAITS}, 6, "QueueWaitAboveTarget"),
        (
            "broken for a short time, these carry it",
            {**BROKEN, "needed": 2, "signals": WAITS},
            4,
            "Steady",
        ),
        (
            "broken for a minute, whatever is needed: one more",
            {**BROKEN, "needed": 2, "wait_lasts": True, "signals": WAITS},
            5,
            "QueueWaitAboveTarget",
        ),
        (
            "broken for a short time, little needed, no model",
            {**BROKEN, "needed": 2, "is_trusted": False, "signals": WAITS},
            4,
            "Steady",
        ),
        (
            "broken, batch has room",
            {**BROKEN, "waits": False, "needed": 2},
            4,
            "Steady",
        ),
        (
            "the waits were before the newest replica",
            {
                **BROKEN,
                "needed": 2,
                "wait_lasts": True,
                "new": 1,
                "is_trusted": False,
                "signals": WAITS,
            },
            4,
            "Steady",
        ),
        (
            "more is needed than that",
            {**BROKEN, "new": 1, "is_trusted": False},
            6,
            "QueueWaitAboveTarget",
        ),
        ("forecast", {"needed": 6}, 6, "LoadForecast"),
        ("forecast without a model", {"needed": 6, "is_trusted": False}, 4, "Steady"),
        ("supply is coming", {**BROKEN, "needed": 4, "ready": 3, "pending": 1}, 4, "Steady"),
        (
            "more than is coming",
            {**BROKEN, "needed": 6, "ready": 3, "pending": 1},
            6,
            "QueueWaitAboveTarget",
        ),
        (
            "more than is coming, no model",
            {**BROKEN, "needed": 6, "ready": 3, "pending": 1, "is_trusted": False},
            6,
            "QueueWaitAboveTarget",
        ),
        (
            "overdue does not count",
            {"needed": 5, "ready": 3, "overdue": 1, "replicas": 4},
            6,
            "LoadForecast",
        ),
        ("at the floor and slow", {"too_slow": True}, 5, "MinimumBatchTooSlow"),
        (
            "never above max",
            {**BROKEN, "needed": 90, "replicas": 9, "ready": 9},
            10,
            "QueueWaitAboveTarget",
        ),
        ("at most double", {**BROKEN, "needed": 90}, 8, "QueueWaitAboveTarget"),
        ("hung engines are not supply", {"needed": 4, "hung": 1}, 4, "Steady"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_up(case: str, change: dict[str, object], want: int, reason: str) -> None:
    """Each way up, and each reason not to."""
    decision = decided(view(**{"needed": 4, **change}), ReplicasMemory())
    assert decision.value == want
    if want > 4:
        assert decision.reason == reason


def test_up_is_blocked_while_the_newest_revision_cannot_start() -> None:
    """More pods of it would only take more accelerators."""
    decision = decided(
        view(**BROKEN, scale_up_blocked="no replica of revision 3 is ready: ImagePull")
    )
    assert not decision.valid
    assert decision.value == 4
    assert decision.reason == "ScaleUpBlocked"


@pytest.mark.parametrize(("pinned", "live"), [(0, 4), (3, 4), (9, 1), (1000, 4)])
def test_a_pin_wins(pinned: int, live: int) -> None:
    """spec.replicas in every mode, also outside min and max."""
    settings = replace(SETTINGS, activation=Activation(State.PINNED, pinned))
    assert decided(view(settings=settings, replicas=live)).value == pinned


@pytest.mark.parametrize(
    ("live", "low", "high", "want"), [(0, 1, 10, 1), (1, 3, 10, 3), (12, 1, 10, 10), (5, 1, 10, 5)]
)
def test_bounds_are_kept_also_without_signals(live: int, low: int, high: int, want: int) -> None:
    """Below the minimum at once; above the maximum once something is known."""
    settings = ControlSettings(min_replicas=low, max_replicas=high)
    seen = view(settings=settings, replicas=live, ready=live, needed=live)
    assert decided(seen).value == want


@pytest.mark.promise("at-least-one")
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.booleans(),
            st.booleans(),
            st.sampled_from(Grade),
            st.integers(0, 3),
            st.floats(0, 1),
            st.booleans(),
        ),
        min_size=5,
        max_size=80,
    ),
    st.integers(1, 5),
    st.integers(5, 20),
)
@examples(150)
def test_replicas_stay_in_bounds_and_go_down_slowly(rows: list[tuple], low: int, high: int) -> None:  # type: ignore[type-arg]
    """For any measurements: within [min, max]; down a step a minute and only after the delay."""
    settings = ControlSettings(min_replicas=low, max_replicas=high, scale_down_delay_s=60.0)
    memory, now, count = ReplicasMemory(), NOW, low
    lowered: list[float] = []
    for needed, broken, at_limit, grade, pending, coverage, lasts in rows:
        seen = view(
            settings=settings,
            replicas=count,
            ready=max(0, count - pending),
            pending=pending,
            needed=needed,
            waits=broken and at_limit,
            wait_lasts=lasts,
            signals=signals(grade=grade, coverage=1.0 if coverage > 0.3 else coverage),
        )
        decision, memory = seen.decide(memory, now)
        assert low <= decision.value <= high
        if decision.value < count:
            assert grade is Grade.FRESH
            assert coverage > 0.3
            assert now - NOW >= 60
            assert not lowered or now - lowered[-1] >= 60
            lowered.append(now)
        count = decision.value
        now += 5


@pytest.mark.parametrize("delay_s", [30.0, 60.0, 600.0, 3600.0])
def test_the_highest_recommendation_of_the_delay_is_remembered(delay_s: float) -> None:
    """And forgotten soon after it (within one slot)."""
    memory = with_recommendation(ReplicasMemory(), 7, delay_s, NOW)
    now = NOW
    while now < NOW + 2 * delay_s:
        now += 5
        memory = with_recommendation(memory, 2, delay_s, now)
        highest = max(count for _, count in memory.recommendations)
        if now - NOW < delay_s:
            assert highest == 7
    assert highest == 2
    assert len(memory.recommendations) <= 23
