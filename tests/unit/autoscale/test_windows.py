"""Windows of 10 s: which requests and steps are counted and judged."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fleetkeeper.autoscale.constants import WINDOW_S
from fleetkeeper.autoscale.signals.observe import observe_service
from fleetkeeper.autoscale.signals.samples import (
    Gauges,
)
from fleetkeeper.autoscale.signals.service_signals import SignalsMemory
from fleetkeeper_contract.step_terms import StepSums
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, sample


def test_windows_are_disjoint_and_ten_seconds() -> None:
    """Each begins where the last one ended."""
    loop = Loop(replicas=2)
    loop.steady(14)
    windows = loop.memory.signals.windows
    assert len(windows) == 6
    for before, after in itertools.pairwise(windows):
        assert after.start >= before.end - 1e-6
        assert after.end - after.start == pytest.approx(WINDOW_S)


@pytest.mark.parametrize(
    ("requests_per_s", "steps_per_s", "wait_judged", "batch_judged"),
    [
        (4.0, 25.0, True, True),
        (1.9, 25.0, False, True),
        (2.0, 9.9, True, False),
        (0.5, 5.0, False, False),
    ],
)
def test_windows_need_20_requests_or_100_steps(
    requests_per_s: float, steps_per_s: float, wait_judged: bool, batch_judged: bool
) -> None:
    """Less is not judged."""
    loop = Loop(replicas=1)
    loop.steady(
        6,
        wait_count_standard=requests_per_s,
        wait_within_standard=requests_per_s,
        batch_time_count=steps_per_s,
        batch_time_within=steps_per_s,
    )
    window = loop.memory.signals.windows[-1]
    assert (window.wait_attainment is not None) is wait_judged
    assert (window.batch_attainment is not None) is batch_judged


def test_each_class_of_steps_is_summed_though_a_scrape_brings_one_of_them() -> None:
    """Decode and prefill sums alternate, one class a tick: every window holds ten seconds of both."""
    views, memory, windows = (pod_view("chat-0"),), SignalsMemory(), []
    for tick in range(13):
        now = NOW + 5 * tick
        sums = StepSums(steps=100.0 * tick, seconds=4.0 * tick)
        row = sample(now)
        row = replace(row, decode=sums) if tick % 2 else replace(row, prefill=sums)
        signals, memory = observe_service([row], views, memory, now)
        windows += [signals.window] if signals.window is not None else []
    assert len(windows) >= 5
    for window in windows[1:]:
        assert (window.decode.steps, window.prefill.steps) == (200.0, 200.0)


def test_batch_tier_is_judged_only_when_alone() -> None:
    """A batch request that waits for minutes, as it may, does not break the objective of others."""
    loop = Loop(replicas=1)
    gauges = Gauges(running=20, oldest_wait_s_batch=300.0, waiting_batch=50.0, limit_sequences=32)
    for _ in range(5):
        mixed = loop.tick(loop.samples(gauges=gauges))
    assert mixed.signals.queue_wait_s < 0.5
    assert mixed.signals.waiting == 0.0
    alone = Loop(replicas=1)
    for _ in range(5):
        decision = alone.tick(
            alone.samples(
                gauges=gauges,
                wait_count_standard=0,
                wait_sum_s_standard=0,
                wait_within_standard=0,
                arrivals_standard=0,
                arrivals_batch=2,
                wait_count_batch=2,
            )
        )
    assert decision.signals.queue_wait_s == 300.0
    assert decision.signals.waiting == 50.0
