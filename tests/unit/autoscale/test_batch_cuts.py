"""Batch limits are lowered for batch time, KV cache and memory, and restored after a cut."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fleetkeeper.autoscale.capacity.targets import Targets
from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.autoscale.types import Limits
from tests.support.batch_cases import HELD, MEMORY, SETTINGS, decided, signals, windows
from tests.support.control_cases import NOW


def test_batch_time_above_objective_lowers_tokens_first() -> None:
    """One notch at once."""
    view = BatchView(signals(windows=windows(0.9, 0.9, 0.9)), SETTINGS)
    assert decided(view) == (Limits(64, 1536), "BatchTimeAboveTarget")


def test_then_sequences_where_no_prefill_is_left() -> None:
    """20% without a model, 10% with one, of what runs."""
    slow = signals(windows=windows(0.9, 0.9, 0.9))
    memory = replace(MEMORY, limits=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS), memory)[0] == Limits(48, 256)
    targets = Targets(None, 60, 64, 5.0)
    followed = replace(memory, followed=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS, targets), followed)[0] == Limits(54, 256)


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


def test_a_cut_is_reverted_by_five_percent_in_thirty_seconds() -> None:
    """Until the value before the cut is reached."""
    view = BatchView(signals(kv_ratio_max=0.7), SETTINGS)
    memory = BatchMemory(limits=Limits(40, 2048), changed=NOW - 60, before_cut=64)
    now, seen = NOW, [40]
    for _ in range(400):
        decision, memory = decide_limits(view, memory, now)
        if decision.value.sequences != seen[-1]:
            seen.append(decision.value.sequences)
        now += 5
    assert seen[-1] == 64
    assert all(b - a <= max(1, 0.05 * a + 0.5) for a, b in itertools.pairwise(seen))
    assert memory.before_cut is None


def test_memory_above_the_cap_tightens() -> None:
    """0.8 of what runs, not more often than every 30 s."""
    view = BatchView(signals(memory_used_ratio=0.83), SETTINGS)
    decision, memory = decide_limits(view, MEMORY, NOW)
    assert decision.reason == "MemoryAboveCap"
    assert decision.value.sequences == 48
    assert decide_limits(view, memory, NOW + 5)[0].value.sequences == 48
