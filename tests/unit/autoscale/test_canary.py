"""A raise is tried on one pod first and reverted if it does harm."""

from __future__ import annotations

import pytest

from fleetkeeper.autoscale.rules.canary import Canary, concluded, judge_canary, needs_canary
from fleetkeeper.autoscale.signals.windows import PodWindow, Window
from fleetkeeper.autoscale.types import Limits
from tests.support.autoscale.batch_cases import HELD, MEMORY
from tests.support.autoscale.control_cases import NOW


@pytest.mark.promise("canary")
@pytest.mark.parametrize(
    ("before", "after", "ready", "wanted"),
    [
        (HELD, Limits(70, 2048), 3, True),
        (HELD, Limits(70, 2048), 2, False),
        (HELD, Limits(60, 2048), 5, False),
        (HELD, Limits(64, 1536), 5, False),
        (None, HELD, 5, False),
        (HELD, HELD, 5, False),
    ],
)
def test_only_raises_of_three_pods_need_a_canary(
    before: Limits | None, after: Limits, ready: int, wanted: bool
) -> None:
    """Tightenings protect and go to all at once."""
    assert needs_canary(before, after, ready) is wanted


def canary_windows(own: float, others: float, count: int = 2, start: float = NOW) -> list[Window]:
    """Windows since the start of the canary."""
    rows = []
    for i in range(count):
        pods = (
            PodWindow("chat-0", 200, 200 * own),
            PodWindow("chat-1", 200, 200 * others),
            PodWindow("chat-2", 200, 200 * others),
        )
        rows.append(Window(start + 10 * i, start + 10 * i + 10, pods=pods))
    return rows


@pytest.mark.parametrize(
    ("own", "others", "good"),
    [
        (0.98, 0.98, True),
        (0.94, 0.98, True),
        (0.92, 0.98, False),
        (0.5, 0.5, True),
        (1.0, 0.2, True),
        (0.0, 0.98, False),
    ],
)
def test_a_canary_is_reverted_when_it_falls_five_points_below(
    own: float, others: float, good: bool
) -> None:
    """Against the other pods, in the same windows."""
    verdict = judge_canary(Canary("chat-0", HELD, NOW), canary_windows(own, others), NOW + 20)
    assert verdict is good


def test_a_canary_is_not_judged_too_early_and_not_for_ever() -> None:
    """One window is too few; after 60 s without evidence it is taken back."""
    canary = Canary("chat-0", HELD, NOW)
    assert judge_canary(canary, canary_windows(0.98, 0.98, 1), NOW + 10) is None
    assert judge_canary(canary, canary_windows(0.98, 0.98, 2, NOW - 30), NOW + 10) is None
    assert judge_canary(canary, [], NOW + 60) is False


def test_a_failed_canary_rests_for_five_minutes() -> None:
    """Nothing is raised meanwhile; a good one is given to all."""
    canary = Canary("chat-0", Limits(70, 2048), NOW)
    assert concluded(MEMORY, canary, NOW + 20, is_good=False).rest_until == NOW + 320
    assert concluded(MEMORY, canary, NOW + 20, is_good=True).limits == Limits(70, 2048)
