"""The report of the control loop: reasons, facts, conditions and events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import LOST_TICKS
from fleetkeeper.autoscale.memory import (
    memory_from_status,
)
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import Gauges, Source
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from fleetkeeper.reconcile.status.control import report_to_status
from fleetkeeper_contract import rfc3339
from tests.support.autoscale.control_cases import (
    NOW,
    Loop,
    condition,
    pod_view,
    reported,
    reported_status,
)


def test_the_lost_prometheus_is_reported_while_pods_are_read_directly() -> None:
    """Decisions continue, nothing is lowered, and both changes have one event."""
    loop = Loop()
    loop.steady(10)
    recorded = []
    for i in range(40):
        direct = [replace(row, source=Source.DIRECT) for row in loop.samples()]
        decision = loop.tick(direct if i < 20 else loop.samples(), prometheus_lost=i < 20)
        recorded += [event.reason for event in decision.events]
        assert decision.breakers.control.state is BreakerState.CLOSED
        report = reported(loop, decision)
        assert condition(report, ConditionType.METRICS_AVAILABLE)[0] == "True"
        shown = reported_status(report.report)["breaker"]["source"]
        assert shown == ("Open" if LOST_TICKS - 1 <= i < 20 else "Closed")
    assert recorded == ["PrometheusLost", "PrometheusBack"]


@pytest.mark.parametrize(
    ("spoil", "reason", "message"),
    [
        ("never", Reason.NO_METRICS, "no usable samples"),
        ("stopped", Reason.STALE_METRICS, "older than a minute"),
        ("warming up", Reason.NO_METRICS, "ready for a minute"),
        ("one of three", Reason.TOO_FEW_REPORT, "Fewer than half"),
        ("none ready", Reason.NO_METRICS, "No replica is ready"),
    ],
)
def test_each_cause_of_unknown_signals_has_its_reason(
    spoil: str, reason: Reason, message: str
) -> None:
    """Never came, stopped coming, too early, too few: each has its own remedy."""
    age_s = 5.0 if spoil == "warming up" else 3600.0
    names = ("chat-0", "chat-1", "chat-2")
    pods = tuple(pod_view(name, age_s=age_s, ready=spoil != "none ready") for name in names)
    loop = Loop(pods=pods, replicas=3)
    if spoil == "stopped":
        loop.steady(6)
    for _ in range(11 if spoil == "warming up" else 14):
        rows = loop.samples() if spoil in {"warming up", "one of three"} else []
        decision = loop.tick(rows[:1] if spoil == "one of three" else rows)
    if spoil == "warming up":
        loop.now = NOW + 50.0
        decision = loop.tick(loop.samples())
    got = condition(reported(loop, decision), ConditionType.METRICS_AVAILABLE)
    assert got[:2] == ("False", reason)
    assert message in got[2]


@pytest.mark.parametrize(
    ("source", "lost", "words"),
    [
        (Source.PROMETHEUS, False, {"from Prometheus"}),
        (Source.DIRECT, False, {"read directly"}),
        (Source.DIRECT, True, {"Prometheus", "read directly", "none is removed"}),
    ],
)
def test_the_source_of_signals_is_reported(source: Source, lost: bool, words: set[str]) -> None:
    """In MetricsAvailable."""
    loop = Loop()
    for _ in range(6):
        rows = [replace(row, source=source) for row in loop.samples()]
        decision = loop.tick(rows, prometheus_lost=lost)
    got = condition(reported(loop, decision), ConditionType.METRICS_AVAILABLE)
    assert got[:2] == ("True", Reason.FRESH_METRICS)
    assert all(word in got[2] for word in words)
    assert ("Prometheus" in got[2]) == (lost or source is Source.PROMETHEUS)


def test_one_slow_answer_of_prometheus_records_no_event() -> None:
    """Two silent ticks are no loss: a thousand services would post a thousand events."""
    loop = Loop()
    loop.steady(10)
    for i in range(30):
        decision = loop.tick(loop.samples(), prometheus_lost=i % 3 != 0)
        assert decision.events == ()


def test_an_allocation_has_its_reason_and_no_event_of_its_own() -> None:
    """Queue wait 1.9 s, objective 0.5 s, batch at its limit; the event is the planner's, once it has written it."""
    loop = Loop()
    reported(loop, loop.steady(20, batch_time_within=24.5))
    waiting = Gauges(
        running=64,
        waiting_standard=200,
        oldest_wait_s_standard=2.9,
        limit_sequences=32,
        kv_capacity_tokens=4e5,
        kv_resident_tokens=1e5,
    )
    recorded: list[str] = []
    for _ in range(6):
        decision = loop.tick(loop.samples(gauges=waiting, batch_time_within=24.5))
        report = reported(loop, decision)
        assert not [text for text in report.events if "Replicas" in text.message]
        if report.allocation is not None and report.allocation.replicas > loop.replicas:
            assert report.allocation.reason == "QueueWaitAboveTarget"
            recorded.append(report.allocation.message)
            loop.replicas = report.allocation.replicas
    assert recorded[0].startswith("Queue wait")
    assert all(figure in recorded[0] for figure in ("2.9 s", "0.5 s"))


@pytest.mark.parametrize("seen", [True, False])
def test_a_number_that_was_found_is_reported_as_externally_changed(seen: bool) -> None:
    """A leader ended between its allocation 2 -> 3 and its status: the next one reports the number that it found."""
    before = Loop()
    status = reported_status(reported(before, before.steady(20)).report)
    assert status["scaling"]["desired"] == 2
    loop = Loop(replicas=3, started=NOW)
    loop.memory = memory_from_status(status, 1, 80, loop.now)
    report = reported(loop, loop.tick(loop.samples() if seen else []))
    assert reported_status(report.report)["decisions"][-1] == {
        "time": rfc3339.format(loop.now),
        "what": "replicas",
        "from": "2",
        "to": "3",
        "reason": "ExternallyChanged",
    }
    assert reported_status(report.report)["scaling"]["reason"] == "ExternallyChanged"
    assert "3 replicas" in reported_status(report.report)["scaling"]["message"]
    recorded = reported_status(report.report)["decisions"]
    for _ in range(3):
        report = reported(loop, loop.tick(loop.samples() if seen else []))
        assert reported_status(report.report)["decisions"] == recorded
    assert reported_status(report.report)["scaling"]["reason"] == (
        "ExternallyChanged" if seen else "SignalsStale"
    )


def test_an_allocation_that_was_never_written_is_reported_as_externally_changed() -> None:
    """2 -> 3 was reported, but the Deployment has 2 and nothing is wanted anymore."""
    loop = Loop()
    decision = loop.steady(20)
    wanted = replace(decision, replicas=replace(decision.replicas, value=3, valid=True))
    reported(loop, wanted, Allocation(3))
    report = reported(loop, decision, Allocation(2))
    assert [
        (row["from"], row["to"], row["reason"])
        for row in reported_status(report.report)["decisions"]
    ][-1] == (
        "3",
        "2",
        "ExternallyChanged",
    )


def test_the_replicas_of_a_service_that_woke_are_reported_as_those_of_its_wake() -> None:
    """The planner sets them. A tick may come when the service is already awake."""
    loop = Loop(settings=ControlSettings(activation=Activation(State.ASLEEP, 0)), replicas=0)
    asleep = reported_status(reported(loop, loop.tick([])).report)
    assert asleep["scaling"]["reason"] == "Asleep"
    loop.settings, loop.replicas = ControlSettings(), 1
    awake = reported_status(reported(loop, loop.tick([])).report)
    assert (awake["scaling"]["reason"], awake["scaling"]["desired"]) == ("Awake", 1)
    assert awake["decisions"][-1]["reason"] == "Awake"


def test_the_status_fits_the_published_schema_and_is_quiet() -> None:
    """Every piece parses; an hour of calm changes nothing in it."""
    loop = Loop(settings=ControlSettings(min_replicas=2))
    report = reported(loop, loop.steady(60))
    InferenceServiceStatus.model_validate(report_to_status(report.report))
    first = None
    for _ in range(200):
        status = reported_status(reported(loop, loop.tick(loop.samples())).report)
        first = first or status
        assert status == first


def test_budget_and_bounds_are_named_in_scaling_limited() -> None:
    """Which of them limits."""
    loop = Loop()
    decision = loop.steady(20)
    wanted = replace(decision, replicas=replace(decision.replicas, value=4))
    limited, _ = build_report(
        wanted, Allocation(2, "the fleet's budget of accelerators"), loop.memory, loop.now
    )
    assert condition(limited, ConditionType.SCALING_LIMITED)[:2] == ("True", Reason.GPU_BUDGET)
    assert "2 of 4" in condition(limited, ConditionType.SCALING_LIMITED)[2]
    free, _ = build_report(decision, Allocation(2), loop.memory, loop.now)
    assert condition(free, ConditionType.SCALING_LIMITED)[0] == "False"


def test_missing_metrics_set_metrics_compatible_to_false() -> None:
    """And are named."""
    loop = Loop()
    for _ in range(5):
        rows = [replace(row, missing=("fleetkeeper_steps_total",)) for row in loop.samples()]
        decision = loop.tick(rows)
    status, reason, message = condition(reported(loop, decision), ConditionType.METRICS_COMPATIBLE)
    assert (status, reason) == ("False", Reason.METRICS_MISSING)
    assert "fleetkeeper_steps_total" in message


@pytest.mark.parametrize("peak", [0.75, 0.83])
@pytest.mark.parametrize("own", [1.0, 0.0])
def test_memory_that_includes_other_pods_is_reported_as_such(peak: float, own: float) -> None:
    """The driver lists no process of one replica."""
    loop = Loop()
    gauges = Gauges(running=20, memory_peak_ratio=peak, memory_own=own, kv_capacity_tokens=4e5)
    for _ in range(6):
        rows = loop.samples(gauges=gauges)
        decision = loop.tick(
            [rows[0], *(replace(row, gauges=gauges._replace(memory_own=1.0)) for row in rows[1:])]
        )
    _, _, message = condition(reported(loop, decision), ConditionType.MEMORY_WITHIN_CAP)
    assert ("including other pods" in message) is (own == 0.0)


@pytest.mark.parametrize(("peak", "status"), [(0.75, "True"), (0.80, "True"), (0.83, "False")])
def test_memory_above_the_cap_is_reported_with_pod_and_share(peak: float, status: str) -> None:
    """From the measured peak."""
    loop = Loop()
    gauges = Gauges(
        running=20, memory_peak_ratio=peak, memory_used_ratio=0.5, kv_capacity_tokens=4e5
    )
    for _ in range(6):
        decision = loop.tick(loop.samples(gauges=gauges))
    got, _, message = condition(reported(loop, decision), ConditionType.MEMORY_WITHIN_CAP)
    assert got == status
    if status == "False":
        assert "chat-" in message
        assert "83%" in message
