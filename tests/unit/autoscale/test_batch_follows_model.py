"""Batch limits follow the step-time model: down near an objective, up for a queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchView
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import Limits
from tests.support.autoscale.batch_cases import (
    HELD,
    MEMORY,
    SETTINGS,
    decided,
    signals,
    targets,
    windows,
)
from tests.support.autoscale.control_cases import NOW

NEAR = signals(batch_time_s=0.04)
"""Batch time is above 0.7 of its objective; queue wait is short."""

WAITS = signals(queue_wait_s=0.2)
"""Queue wait is above a quarter of its objective; steps are short."""

BOTH = signals(batch_time_s=0.04, queue_wait_s=0.2)
"""Both are near."""


def test_limits_go_down_to_the_targets_near_the_batch_time_objective() -> None:
    """Both at once."""
    view = BatchView(NEAR, SETTINGS, targets(1024, 40))
    assert decided(view) == (Limits(40, 1024), "FollowsStepTimeModel")


@pytest.mark.parametrize("seen", [signals(), WAITS], ids=["quiet", "requests wait"])
def test_an_engine_with_short_steps_keeps_its_limits(seen: Signals) -> None:
    """A smaller batch would shorten nothing, and a burst would find it. Smaller steps lengthen a queue."""
    assert decided(BatchView(seen, SETTINGS, targets(1024, 40))) == (HELD, "Steady")


def test_single_long_steps_lower_tokens_only() -> None:
    """Attainment is low, and neither objective is near: the tokens of a step are what lengthens it."""
    slow = signals(windows=windows(0.9, 0.9))
    assert decided(BatchView(slow, SETTINGS, targets(1024, 40)))[0] == Limits(64, 1024)


@pytest.mark.parametrize("seen", [NEAR, signals()], ids=["near", "quiet"])
def test_nothing_is_raised_without_a_queue(seen: Signals) -> None:
    """Targets above the limits are only followed while requests wait."""
    assert decided(BatchView(seen, SETTINGS, targets(4096, 110)))[0] == HELD


def test_limits_go_up_to_the_targets_for_a_queue() -> None:
    """Not within half a minute of the last change."""
    view = BatchView(WAITS, SETTINGS, targets(4096, 110))
    assert decided(view) == (Limits(110, 4096), "FollowsStepTimeModel")
    assert decided(view, replace(MEMORY, changed=NOW - 29))[0] == HELD


@pytest.mark.parametrize(
    ("target", "want"), [(64, 64), (58, 64), (57, 57), (40, 40), (70, 64), (71, 71)]
)
def test_the_targets_are_absolute(target: int, want: int) -> None:
    """Sequences follow a target that is more than a tenth away."""
    view = BatchView(BOTH, SETTINGS, targets(2048, target))
    assert decided(view, MEMORY)[0] == Limits(want, 2048)


@pytest.mark.parametrize("seen", [NEAR, WAITS], ids=["down", "up"])
def test_a_model_that_missed_is_not_followed(seen: Signals) -> None:
    """It was off by half in the last window."""
    for wanted in (targets(1024, 40), targets(4096, 110)):
        view = BatchView(seen, SETTINGS, wanted, model_missed=True)
        assert decided(view)[0] == HELD


def test_one_move_with_the_model_leaves_half_of_the_sequences() -> None:
    """A model that learned from a crowded minute predicts the floor: it costs a half, and the rest is kept."""
    view = BatchView(BOTH, SETTINGS, targets(2048, 4))
    decision, memory = decide_limits(view, MEMORY, NOW)
    assert (decision.value, decision.reason) == (Limits(32, 2048), "FollowsStepTimeModel")
    assert decide_limits(view, memory, NOW + 25)[0].value.sequences == 32
    assert decide_limits(view, memory, NOW + 30)[0].value.sequences == 16
    better = replace(view, targets=targets(2048, 64))
    assert decide_limits(better, memory, NOW + 30)[0].value.sequences == 64


def test_running_sequences_are_kept_while_replicas_start() -> None:
    """50 run in each of two pods; without a pending replica the target counts."""
    busy = replace(BOTH, gauges=Gauges(running=100.0))
    view = BatchView(busy, SETTINGS, targets(2048, 40), pending=1)
    assert decided(view)[0].sequences == 50
    assert decided(replace(view, pending=0))[0].sequences == 40


def test_tokens_follow_the_model_while_sequences_wait() -> None:
    """Half a minute for sequences after a cut; tokens have no such wait."""
    memory = replace(MEMORY, changed=NOW - 12)
    assert decided(BatchView(NEAR, SETTINGS, targets(1024, 32)), memory)[0] == Limits(64, 1024)


@pytest.mark.parametrize(
    ("batch_time_s", "queue_wait_s", "moves"),
    [(0.03, 2.0, True), (0.036, 2.0, False), (0.03, 0.1, False)],
)
def test_the_model_is_followed_up_while_requests_are_shed(
    batch_time_s: float, queue_wait_s: float, moves: bool
) -> None:
    """An open load breaker keeps limits from rising, unless a wider batch is what would close it."""
    memory = replace(MEMORY, limits=Limits(8, 2048))
    busy = signals(
        gauges=Gauges(running=16.0), batch_time_s=batch_time_s, queue_wait_s=queue_wait_s
    )
    view = BatchView(busy, SETTINGS, targets(2048, 64), gated=True)
    limits, reason = decided(view, memory)
    assert (limits.sequences > 8) is moves
    assert (limits.sequences, reason) == (64, "FollowsStepTimeModel") or not moves


@pytest.mark.parametrize(
    ("tokens", "target", "wait_s", "want"),
    [
        (384, 256, 0.2, 384),
        (384, 512, 0.2, 384),
        (384, 512, 0.6, 512),
        (384, 640, 0.2, 640),
        (640, 384, 0.2, 384),
    ],
)
def test_a_target_of_one_notch_needs_a_missed_objective(
    tokens: int, target: int, wait_s: float, want: int
) -> None:
    """The fit moves T* by a notch from minute to minute. Limits that go along change direction for nothing."""
    memory = replace(MEMORY, limits=Limits(64, tokens))
    seen = signals(batch_time_s=0.04, queue_wait_s=wait_s)
    view = BatchView(seen, SETTINGS, targets(target, 64))
    assert decided(view, memory)[0].tokens == want
