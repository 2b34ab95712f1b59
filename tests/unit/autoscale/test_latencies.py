"""TTFT and ITL in the control loop: means of what users saw, shown and never part of a decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import Counters, Latencies, PodSample
from fleetkeeper.autoscale.signals.series_map import REQUIRED, edges_of, sample_of
from fleetkeeper.reconcile.status.control import report_to_status
from tests.support.autoscale.control_cases import NOW, Loop, sample
from tests.support.autoscale.engine_metrics import metrics_series

TTFT, ITL = "signal_time_to_first_token_seconds", "signal_inter_token_latency_seconds"
TICKS = 8
Rates = Mapping[str, float]


def seen(second: float, per_second: Rates) -> Latencies:
    """What users saw until `second`; nothing but the given rates."""
    return Latencies(**{name: rate * second for name, rate in per_second.items()})


def run(per_second: Rates, *, failed: tuple[int, ...] = ()) -> ControlDecision:
    """The decision after so many ticks; in those that `failed` no latencies are known."""
    loop = Loop(replicas=1)
    decision = None
    for tick in range(TICKS):
        latencies = None if tick in failed else seen(loop.now - NOW + 100, per_second)
        (row,) = loop.samples()
        decision = loop.tick([replace(row, latencies=latencies)])
    assert decision is not None
    return decision


def shown(decision: ControlDecision) -> dict[str, float]:
    """The gauges of TTFT and ITL."""
    result, _ = build_report(decision, Allocation(1), Loop().memory, NOW)
    return {name: value for name, _, value in result.metrics if name in (TTFT, ITL)}


STANDARD = {
    "ttft_count_standard": 4.0, "ttft_sum_s_standard": 1.2,
    "itl_count_standard": 100.0, "itl_sum_s_standard": 4.0,
}  # fmt: skip
REALTIME = {"ttft_count_realtime": 4.0, "ttft_sum_s_realtime": 0.4}
BATCH = {
    "ttft_count_batch": 1.0, "ttft_sum_s_batch": 30.0,
    "itl_count_batch": 50.0, "itl_sum_s_batch": 5.0,
}  # fmt: skip


def test_the_means_are_over_requests_and_over_gaps() -> None:
    assert shown(run(STANDARD)) == pytest.approx({TTFT: 0.3, ITL: 0.04})


def test_realtime_and_standard_count_together_and_batch_only_if_it_is_alone() -> None:
    """As queue wait does, so that both can be compared. Batch waits on purpose."""
    assert shown(run({**STANDARD, **REALTIME, **BATCH})) == pytest.approx({TTFT: 0.2, ITL: 0.04})
    loop = Loop(replicas=1)
    for _ in range(TICKS):
        (row,) = loop.samples(
            arrivals_standard=0.0, wait_count_standard=0.0, wait_sum_s_standard=0.0,
            wait_within_standard=0.0, arrivals_batch=1.0,
        )  # fmt: skip
        decision = loop.tick([replace(row, latencies=seen(loop.now - NOW + 100, BATCH))])
    assert shown(decision) == pytest.approx({TTFT: 30.0, ITL: 0.1})


def test_batch_does_not_stand_for_interactive_requests_that_are_not_streamed() -> None:
    assert shown(run(BATCH)) == {}


def test_every_pod_counts_by_what_it_streamed() -> None:
    """Nine requests at 0.1 s and one at 1.1 s are 0.2 s on average."""
    loop = Loop(replicas=2)
    decision = None
    for _ in range(TICKS):
        second = loop.now - NOW + 100
        fast = seen(second, {"ttft_count_standard": 9.0, "ttft_sum_s_standard": 0.9})
        slow = seen(second, {"ttft_count_standard": 1.0, "ttft_sum_s_standard": 1.1})
        rows = zip(loop.samples(), (fast, slow), strict=True)
        decision = loop.tick([replace(row, latencies=value) for row, value in rows])
    assert decision is not None
    assert shown(decision) == pytest.approx({TTFT: 0.2})


def test_without_streams_nothing_is_shown() -> None:
    """Unknown is absent, never 0."""
    assert shown(run({})) == {}


def test_an_engine_of_an_older_image_lacks_nothing() -> None:
    """It exports neither series: its sample is complete, decisions go on, and nothing is shown."""
    names = ("fleetkeeper_time_to_first_token_seconds", "fleetkeeper_inter_token_latency_seconds")
    edges = edges_of(Loop().settings)
    assert not [name for name in REQUIRED if name.startswith(names)]
    row = sample(NOW)
    series = [item for item in metrics_series(row, edges) if not item[0].startswith(names)]
    found = sample_of("chat-0", NOW, series, edges, row.source)
    assert (found.missing, found.latencies) == ((), None)
    decision = run({}, failed=tuple(range(TICKS)))
    assert decision.signals.known
    assert shown(decision) == {}


@pytest.mark.parametrize("failed", [(7,), (0,), (3, 4)])
def test_a_failed_query_is_no_restart_and_hides_nothing(failed: tuple[int, ...]) -> None:
    """The values of the tick before stand in; counters that are absent are not counters at 0."""
    decision = run(STANDARD, failed=failed)
    assert decision.signals.known
    assert shown(decision) == pytest.approx({TTFT: 0.3, ITL: 0.04})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", ["ttft_count_standard", "itl_sum_s_standard"])
def test_impossible_values_are_not_shown_and_decide_nothing(name: str, bad: float) -> None:
    """A pod that reports nonsense here is otherwise believed, and the nonsense is shown nowhere."""
    loop = Loop(replicas=1)
    decision = None
    for tick in range(TICKS):
        (row,) = loop.samples()
        latencies = seen(loop.now - NOW + 100, STANDARD)
        if tick == TICKS - 1:
            latencies = latencies._replace(**{name: bad})
        decision = loop.tick([replace(row, latencies=latencies)])
    assert decision is not None
    assert decision.signals.reporting_pods == 1
    assert shown(decision) == {}


def without(decision: ControlDecision) -> Any:
    """Everything decided, and what is written to the status; without what is only shown."""
    result, _ = build_report(decision, Allocation(1), Loop().memory, NOW)
    return (
        decision.replicas, decision.in_force, decision.breakers, decision.admission,
        decision.pressure, decision.puts, report_to_status(result.report), result.allocation, result.events,
    )  # fmt: skip


def test_no_decision_and_no_status_depends_on_them() -> None:
    """Users who wait a minute for a token change the two gauges, and nothing else."""
    calm, slow = run(STANDARD), run({**STANDARD, "ttft_sum_s_standard": 240.0})
    assert shown(calm) != shown(slow)
    assert without(calm) == without(slow) == without(run({}, failed=tuple(range(TICKS))))


def test_they_are_kept_apart_from_the_counters_that_show_a_restart() -> None:
    assert not set(Latencies._fields) & set(Counters._fields)
    assert PodSample("chat-0", NOW, Counters(), sample(NOW).gauges).latencies is None
