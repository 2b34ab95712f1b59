"""Batch limits follow the step-time model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.capacity.targets import Targets
from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.types import Limits
from tests.support.batch_cases import HELD, MEMORY, SETTINGS, decided, signals
from tests.support.control_cases import NOW


def test_the_model_is_followed_at_once_when_first_known() -> None:
    """The first limits are a guess."""
    view = BatchView(signals(), SETTINGS, Targets(4096, 100, 110, 5.0))
    limits, reason = decided(view, replace(MEMORY, changed=NOW - 5))
    assert (limits, reason) == (Limits(110, 4096), "FollowsStepTimeModel")


@pytest.mark.parametrize(
    ("before", "after", "want"), [(100, 105, 64), (100, 91, 64), (100, 80, 51), (100, 120, 77)]
)
def test_the_model_is_followed_by_as_much_as_it_moved(before: int, after: int, want: int) -> None:
    """Trim is kept; moves below a tenth are not followed."""
    memory = replace(MEMORY, followed=Limits(before, 2048))
    view = BatchView(signals(), SETTINGS, Targets(2048, after, after, 5.0))
    assert decided(view, memory)[0].sequences == want


def test_a_frozen_model_is_not_followed() -> None:
    """After a refit that jumped, tuning waits."""
    view = BatchView(signals(), SETTINGS, Targets(4096, 100, 110, 5.0), model_frozen=True)
    assert decided(view)[0] == HELD


def test_one_move_with_the_model_leaves_half_of_the_sequences() -> None:
    """A model that learned from a crowded minute asks for the floor: it costs a half, and the rest is kept."""
    view = BatchView(signals(), SETTINGS, Targets(2048, 4, 4, 5.0))
    for followed in (None, Limits(64, 2048)):
        decision, memory = decide_limits(view, replace(MEMORY, followed=followed), NOW)
        assert (decision.value, decision.reason) == (Limits(32, 2048), "FollowsStepTimeModel")
        assert decide_limits(view, memory, NOW + 25)[0].value.sequences == 32
        assert decide_limits(view, memory, NOW + 30)[0].value.sequences == 16
        better = replace(view, targets=Targets(2048, 64, 64, 5.0))
        assert decide_limits(better, memory, NOW + 30)[0].value.sequences == 64


def test_the_model_may_lower_the_first_guess_at_once() -> None:
    """The first limits, ten seconds old, are the mean of floor and ceiling."""
    began = BatchMemory(limits=HELD, changed=NOW - 10)
    view = BatchView(signals(), SETTINGS, Targets(2048, 40, 40, 5.0))
    assert decided(view, began) == (Limits(40, 2048), "FollowsStepTimeModel")


def test_tokens_follow_the_model_while_sequences_wait() -> None:
    """Half a minute for sequences after a cut; tokens have no such wait, or the trim would come first."""
    memory = replace(MEMORY, changed=NOW - 12, followed=Limits(64, 2048))
    view = BatchView(signals(), SETTINGS, Targets(1024, 32, 32, 5.0))
    assert decided(view, memory)[0] == Limits(64, 1024)


@pytest.mark.parametrize(
    ("batch_time_s", "queue_wait_s", "moves"),
    [(0.03, 2.0, True), (0.036, 2.0, False), (0.03, 0.1, False)],
)
def test_the_model_is_followed_up_while_requests_are_shed(
    batch_time_s: float, queue_wait_s: float, moves: bool
) -> None:
    """An open load breaker keeps limits from rising, unless a wider batch is what would close it."""
    memory = replace(MEMORY, limits=Limits(8, 2048), followed=Limits(8, 2048))
    busy = signals(
        gauges=Gauges(running=16.0), batch_time_s=batch_time_s, queue_wait_s=queue_wait_s
    )
    view = BatchView(busy, SETTINGS, Targets(2048, 64, 64, 5.0), gated=True)
    limits, reason = decided(view, memory)
    assert (limits.sequences > 8) is moves
    assert (limits.sequences, reason) == (64, "FollowsStepTimeModel") or not moves
