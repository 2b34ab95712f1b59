"""Batch limits are lowered for batch time, KV cache and memory, and restored after a cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchView, far_moves
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.autoscale.types import Limits
from tests.support.autoscale.batch_cases import (
    HELD,
    MEMORY,
    SETTINGS,
    decided,
    signals,
    targets,
    window,
    windows,
)
from tests.support.autoscale.control_cases import NOW


@pytest.mark.promise("slow-steps")
def test_batch_time_above_objective_lowers_tokens_first() -> None:
    """One notch at once."""
    view = BatchView(signals(windows=windows(0.9, 0.9, 0.9)), SETTINGS)
    assert decided(view) == (Limits(64, 1536), "BatchTimeAboveTarget")


def test_long_steps_lower_tokens_in_proportion() -> None:
    """A mean step of 150 ms, three times the objective, is too long for one notch: 2048 / 3 is 682."""
    long = replace(window(1.0), seconds=0.15 * 400)
    assert decided(BatchView(signals(windows=(long,)), SETTINGS)) == (
        Limits(64, 640),
        "BatchTimeAboveTarget",
    )


@pytest.mark.parametrize(
    ("mean_s", "lowered"), [(0.049, False), (0.05, False), (0.051, True), (5.0, True)]
)
def test_a_mean_step_above_the_objective_counts_without_a_judgment(
    mean_s: float, lowered: bool
) -> None:
    """Twenty steps are too few to judge attainment, and long ones are few."""
    few = replace(window(steps=20.0), seconds=20.0 * mean_s)
    assert few.batch_attainment is None
    limits, _ = decided(BatchView(signals(windows=(few,)), SETTINGS))
    assert (limits.tokens < HELD.tokens) is lowered
    before = replace(few, start=MEMORY.changed - 1)
    assert decided(BatchView(signals(windows=(before,)), SETTINGS))[0] == HELD


def test_tokens_go_straight_to_the_target_of_the_model() -> None:
    """A notch less may only cut a prompt into more steps that are too long; a model that missed is not asked."""
    slow = BatchView(signals(windows=windows(0.9, 0.9)), SETTINGS, targets(512, 64))
    assert decided(slow) == (Limits(64, 512), "BatchTimeAboveTarget")
    assert decided(replace(slow, model_missed=True))[0] == Limits(64, 1536)
    higher = replace(slow, targets=targets(4096, 64))
    assert decided(higher)[0] == Limits(64, 1536), "never up for steps that are too long"


def test_nothing_is_raised_for_a_while_if_the_model_errs() -> None:
    """Steps are too long although the limits are at the model's target."""
    slow = signals(windows=windows(0.9, 0.9))
    at_target = BatchView(slow, SETTINGS, targets(2048, 64))
    assert decide_limits(at_target, MEMORY, NOW)[1].rest_until == NOW + 300
    above = BatchView(slow, SETTINGS, targets(1024, 64))
    assert decide_limits(above, MEMORY, NOW)[1].rest_until == 0.0


@pytest.mark.promise("slow-steps")
def test_then_sequences_where_no_prefill_is_left() -> None:
    """20% without a model, 10% with one, of what runs."""
    slow = signals(windows=windows(0.9, 0.9, 0.9), batch_time_s=0.045)
    memory = replace(MEMORY, limits=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS), memory)[0] == Limits(48, 256)
    assert decided(BatchView(slow, SETTINGS, targets(None, 60)), memory)[0] == Limits(54, 256)


def test_sequences_stay_while_no_objective_is_near() -> None:
    """Steps of 30 ms with a few long ones: fewer sequences would shorten none of them."""
    slow = signals(windows=windows(0.9, 0.9, 0.9), batch_time_s=0.03)
    memory = replace(MEMORY, limits=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS), memory)[0] == Limits(64, 256)
    waits = replace(slow, queue_wait_s=0.13)
    assert decided(BatchView(waits, SETTINGS), memory)[0] == Limits(64, 256)
    near = replace(slow, batch_time_s=0.035)
    assert decided(BatchView(near, SETTINGS), memory)[0] == Limits(48, 256)


@pytest.mark.parametrize(("since_s", "moves"), [(5.0, False), (9.9, False), (30.0, True)])
def test_down_at_most_every_ten_seconds(since_s: float, moves: bool) -> None:
    """And windows that straddle the last change are not judged."""
    slow = signals(windows=windows(0.5, 0.5))
    limits, _ = decided(BatchView(slow, SETTINGS), replace(MEMORY, changed=NOW - since_s))
    assert (limits != HELD) is moves


@pytest.mark.parametrize(
    ("preemptions", "kv", "pending", "want"),
    [
        (0.3, 0.5, 0, 48),
        (0.1, 0.5, 0, 64),
        (0.0, 0.93, 0, 48),
        (0.0, 0.92, 0, 64),
        (0.3, 0.5, 1, 60),
    ],
)
def test_preemptions_and_a_full_cache_cut_to_eight_tenths_of_what_runs(
    preemptions: float, kv: float, pending: int, want: int
) -> None:
    """At once; while replicas are pending not below what runs."""
    rates = Counters(preemptions=2 * preemptions, prompt_tokens=1.0)
    view = BatchView(signals(rates=rates, kv_ratio_max=kv), SETTINGS, pending=pending)
    assert decided(view)[0].sequences == want


def test_memory_above_the_cap_tightens() -> None:
    """0.8 of what runs, not more often than every 30 s."""
    view = BatchView(signals(memory_used_ratio=0.83), SETTINGS)
    decision, memory = decide_limits(view, MEMORY, NOW)
    assert decision.reason == "MemoryAboveCap"
    assert decision.value.sequences == 48
    assert decide_limits(view, memory, NOW + 5)[0].value.sequences == 48


@pytest.mark.parametrize(
    ("mean_s", "tokens", "counts"), [(0.06, 1536, 0), (0.15, 640, 1)], ids=["near", "far"]
)
def test_only_moves_of_more_than_two_notches_are_changes_of_direction(
    mean_s: float, tokens: int, counts: int
) -> None:
    """From 2048 after a raise: one notch down follows the load, four are another opinion."""
    raised = replace(MEMORY, last_directions=(0, 1))
    long = replace(window(1.0), seconds=mean_s * 400)
    decision, memory = decide_limits(BatchView(signals(windows=(long,)), SETTINGS), raised, NOW)
    assert decision.value == Limits(64, tokens)
    assert len(memory.reversals) == counts


@pytest.mark.parametrize(
    ("before", "after", "far"),
    [
        (Limits(64, 256), Limits(78, 512), (False, False)),
        (Limits(78, 512), Limits(64, 256), (False, False)),
        (Limits(64, 256), Limits(79, 640), (True, True)),
        (Limits(64, 8192), Limits(64, 256), (False, True)),
    ],
)
def test_what_is_a_far_move(before: Limits, after: Limits, far: tuple[bool, bool]) -> None:
    assert far_moves(before, after, SETTINGS) == far
