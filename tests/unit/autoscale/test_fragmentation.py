"""Fragmented replicas are restarted at most once an hour, one at a time, only in a calm fleet, and only on evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.memory import memory_from_status
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.fragmentation import (
    FragmentationMemory,
    Reading,
    RestartReason,
    Run,
    decide_fragmentation_restart,
    with_readings,
)
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, TierBreaker
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from fleetkeeper.reconcile.status.control import report_to_status
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, reported_status, sample

PODS = tuple(pod_view(f"chat-{i}") for i in range(3))
ON = ControlSettings(min_replicas=3, max_replicas=3, restart_fragmented=True)
CALM = Gauges(
    running=4.0,
    limit_sequences=32.0,
    limit_tokens=1024.0,
    kv_capacity_tokens=400_000.0,
    kv_resident_tokens=40_000.0,
    memory_peak_ratio=0.75,
    memory_fragmentation_ratio=0.05,
)
Spoil = Callable[[list[PodSample]], list[PodSample]]


def tick(loop: Loop, spoil: Spoil = list, **inputs: Any) -> ControlDecision:
    """One tick of a fleet with little to do, in which only `chat-1` is fragmented: 40%."""
    rows = loop.samples(CALM)
    ratios = {"chat-1": 0.4}
    rows = [gauged(row, memory_fragmentation_ratio=ratios.get(row.pod, 0.05)) for row in rows]
    return loop.tick(spoil(rows), **{"put_outcomes": loop.outcomes, **inputs})


def gauged(row: PodSample, **gauges: float) -> PodSample:
    """The sample with other gauges."""
    return replace(row, gauges=row.gauges._replace(**gauges))


@cache
def before_a_restart() -> Loop:
    """A fleet whose next tick restarts `chat-1`."""
    loop = Loop(settings=ON, replicas=3)
    while not tick(after := copy(loop)).restart.valid:
        assert after.now <= NOW + 650
        loop = after
    assert loop.now >= NOW + 600
    return loop


def only(pod: str, spoil: Callable[[PodSample], PodSample | None]) -> Spoil:
    """A change of one pod's samples; None removes them."""
    return lambda rows: [
        after for row in rows if (after := spoil(row) if row.pod == pod else row) is not None
    ]


def test_a_restart_is_an_event_a_change_in_the_status_and_the_last_for_an_hour() -> None:
    loop = copy(before_a_restart())
    decision = tick(loop)
    report, memory = build_report(decision, Allocation(3), loop.memory, loop.now)
    ((pod, removal),) = decision.replace_pods.items()
    assert pod == "chat-1"
    assert "chat-1 is drained" in removal.event.message
    assert all(figure in removal.event.message for figure in ("40.0%", "30%", "10 minutes"))
    row = reported_status(report.report)["decisions"][-1]
    assert (row["what"], row["to"], row["reason"]) == ("restart", "chat-1", "EngineFragmented")
    InferenceServiceStatus.model_validate(report_to_status(report.report))
    gauges = {(name, labels): value for name, labels, value in report.metrics}
    assert gauges["signal_fragmentation_ratio", ()] == 0.4
    assert gauges["decision_restart", (("reason", "EngineFragmented"),)] == 1.0
    loop.memory = memory
    assert tick(loop).restart.reason == RestartReason.RATE_LIMITED


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"settings": replace(ON, restart_fragmented=False)}, RestartReason.NONE),
        ({"replicas": 1, "pods": PODS[1:2]}, RestartReason.ONLY_REPLICA),
        ({"rolling_out": True}, RestartReason.CHANGING),
        ({"out_of_memory_pods": ("chat-2",)}, RestartReason.CHANGING),
        ({"allocated_replicas": 2}, RestartReason.CHANGING),
        ({"settings": replace(ON, activation=Activation(State.PINNED, 2))}, RestartReason.CHANGING),
        ({"settings": replace(ON, min_replicas=4, max_replicas=4)}, RestartReason.CHANGING),
        ({"replicas": 2}, RestartReason.CHANGING),
        ({"pods": PODS[:2]}, RestartReason.CHANGING),
        ({"pods": (*PODS, pod_view("chat-3"))}, RestartReason.CHANGING),
        ({"pods": (*PODS[:2], replace(PODS[2], deleting=True))}, RestartReason.CHANGING),
        ({"pods": (*PODS, replace(PODS[2], name="old", deleting=True))}, RestartReason.CHANGING),
    ],
    ids=str,
)
def test_nothing_is_restarted_while_something_else_changes(
    inputs: dict[str, Any], reason: RestartReason
) -> None:
    """Each fact alone prevents the restart that is due. The switch is off by default."""
    assert not ControlSettings().restart_fragmented
    decision = tick(copy(before_a_restart()), **inputs)
    assert decision.restart.reason == reason
    assert "chat-1" not in decision.replace_pods


@pytest.mark.parametrize("acts", [True, False], ids=["acting", "reporting"])
@pytest.mark.parametrize(
    "memory",
    [
        {"load": LoadBreaker(batch=TierBreaker(BreakerState.OPEN, NOW + 1e6, reason="test"))},
        {"control": ControlBreaker(BreakerState.OPEN, NOW + 600, "Oscillating", "test", 120.0)},
        {
            "control": ControlBreaker(
                BreakerState.HALF_OPEN, NOW + 600, "Oscillating", "test", 120.0
            )
        },
        {"source": SourceBreaker(BreakerState.OPEN, NOW)},
    ],
    ids=["load", "control", "half-open", "source"],
)
def test_nothing_is_restarted_while_a_breaker_is_not_closed(
    memory: dict[str, Any], acts: bool
) -> None:
    """Also where breakers only report."""
    loop = copy(before_a_restart())
    breakers = replace(loop.memory.breakers, **memory)
    loop.memory = replace(loop.memory, breakers=breakers)
    settings = replace(ON, breakers_act=acts)
    decision = tick(loop, settings=settings, prometheus_lost="source" in memory)
    assert not decision.breakers.are_closed
    assert decision.restart.reason == RestartReason.BLOCKED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: [gauged(row, running=250.0) for row in rows],
        only("chat-0", lambda row: gauged(row, waiting_standard=1.0, oldest_wait_s_standard=2.0)),
        only("chat-2", lambda row: gauged(row, running=math.nan)),
    ],
    ids=["busy", "queue", "another replica unknown"],
)
def test_nothing_is_restarted_that_a_scale_down_would_not_remove(spoil: Spoil) -> None:
    assert tick(copy(before_a_restart()), spoil).restart.reason == RestartReason.BLOCKED


def test_a_hung_engine_is_replaced_first() -> None:
    loop = copy(before_a_restart())
    stuck = sample(loop.now - 5, "chat-2").counters
    hangs = only("chat-2", lambda row: gauged(replace(row, counters=stuck), hung=1.0))
    decisions = [tick(loop, hangs) for _ in range(14)]
    assert decisions[-1].signals.hung_pods == ("chat-2",)
    assert {pod for decision in decisions for pod in decision.replace_pods} == {"chat-2"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: replace(row, missing=("fleetkeeper_steps_total",)),
        lambda row: sample(row.time, row.pod, origin=row.time - 1, gauges=row.gauges),
        lambda row: gauged(row, running=math.nan),
        *(
            lambda row, ratio=ratio: gauged(row, memory_fragmentation_ratio=ratio)
            for ratio in (math.nan, math.inf, -0.1, 1.2, 0.3, 0.0)
        ),
    ],
    ids=["incomplete", "reset", "NaN elsewhere", "NaN", "infinite", "negative", "above one", "30%",
         "not exported"],
)  # fmt: skip
def test_one_sample_that_proves_nothing_restarts_the_ten_minutes(
    spoil: Callable[[PodSample], PodSample],
) -> None:
    loop = copy(before_a_restart())
    assert tick(loop, only("chat-1", spoil)).restart.reason == RestartReason.NONE
    assert loop.memory.fragmentation.runs == {}


@pytest.mark.parametrize(
    "spoil", [lambda _: None, lambda row: replace(row, time=row.time - 40)], ids=["absent", "stale"]
)
def test_fifteen_seconds_without_a_sample_restart_the_ten_minutes(
    spoil: Callable[[PodSample], PodSample | None],
) -> None:
    loop = copy(before_a_restart())
    for _ in range(4):
        assert tick(loop, only("chat-1", spoil)).restart.reason == RestartReason.NONE
    assert loop.memory.fragmentation.runs == {}


@pytest.mark.parametrize(
    "ready", [{"ready_since": NOW + 590}, {"ready": False, "ready_since": None}]
)
def test_a_replica_that_is_not_warmed_up_restarts_the_ten_minutes(ready: dict[str, Any]) -> None:
    loop = copy(before_a_restart())
    tick(loop, pods=(PODS[0], replace(PODS[1], **ready), PODS[2]))
    assert loop.memory.fragmentation.runs == {}


@pytest.mark.parametrize(
    "changed",
    [{"scaling_mode": ScalingMode.ADVISORY}, {"batching_mode": BatchingMode.ADVISORY}, {"paused": True}],
    ids=str,
)  # fmt: skip
def test_advisory_and_paused_only_report(changed: dict[str, Any]) -> None:
    """At the same rate, and without an entry among the changes in the status."""
    loop = copy(before_a_restart())
    decision = tick(loop, settings=replace(ON, **changed))
    (event,) = [event for event in decision.events if event.reason == "EngineFragmented"]
    assert "chat-1 would be drained and restarted" in event.message
    assert decision.replace_pods == {}
    report, _ = build_report(decision, Allocation(3), loop.memory, loop.now)
    assert not [row for row in reported_status(report.report)["decisions"] if row["what"] == "restart"]  # fmt: skip
    assert tick(loop, settings=replace(ON, **changed)).restart.reason == RestartReason.RATE_LIMITED


def test_the_hour_begins_with_the_leader() -> None:
    assert memory_from_status({}, 1, 80, NOW).fragmentation == FragmentationMemory(restarted=NOW)


RATIOS = st.sampled_from([None, 0.0, 0.3, 0.31, 0.5, 0.5, 0.5, 0.9])
SPANS = st.tuples(
    st.sampled_from([5, 5, 5, 14.9, 15.1]), st.integers(1, 300), st.lists(RATIOS, min_size=3, max_size=3),
    st.sampled_from(["", "", "", "alone", "changing", "blocked"]),
)  # fmt: skip


@given(st.lists(SPANS, min_size=1, max_size=12))
def test_each_restart_is_proven_alone_and_an_hour_after_the_last(
    spans: list[tuple[float, int, list[float | None], str]],
) -> None:
    """Against a second account of each replica's run, kept with neither gaps nor low readings."""
    memory, now, restarted = FragmentationMemory(restarted=NOW - 3000), NOW, NOW - 3000
    since: dict[str, float] = {}
    last: dict[str, float] = {}
    for step, ticks, ratios, trouble in spans:
        high = {f"chat-{i}": ratio for i, ratio in enumerate(ratios) if ratio and ratio > 0.3}
        for _ in range(ticks):
            now += step
            read = {f"chat-{i}": Reading(now, ratio) for i, ratio in enumerate(ratios) if ratio is not None}  # fmt: skip
            memory = with_readings(memory, read)
            went_on = {pod for pod in high if pod in since and now - last[pod] <= 15.0}
            since = {pod: since[pod] if pod in went_on else now for pod in high}
            last = dict.fromkeys(high, now)
            assert memory.runs == {pod: Run(since[pod], Reading(now, high[pod])) for pod in high}
            proven = {pod: high[pod] for pod in high if now - since[pod] >= 600.0}
            decision, memory = decide_fragmentation_restart(
                memory,
                now,
                replicas=1 if trouble == "alone" else 3,
                settled=trouble != "changing",
                blocked=trouble == "blocked",
            )
            assert decision.valid is (bool(proven) and not trouble and now - restarted >= 3600.0)
            if decision.valid:
                assert decision.value == (min(proven, key=lambda pod: (-proven[pod], pod)),)
                restarted = now
            assert memory.restarted == restarted
