"""What the control loop takes for a hang: the engine's own verdict, given long enough, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.capacity.supply import supply_of
from fleetkeeper.autoscale.constants import HANG_S
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    PodSample,
    Source,
)
from fleetkeeper.autoscale.signals.series_map import OPTIONAL, REQUIRED, sample_of
from fleetkeeper.autoscale.types import ControlSettings
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, reported_status, sample
from tests.support.autoscale.engine_metrics import metrics_series

BUSY = Gauges(
    waiting_standard=3.0, running=5.0, limit_sequences=32.0, limit_tokens=1024.0,
    kv_capacity_tokens=4e5,
)  # fmt: skip
HELD = BUSY._replace(running=0.0)
EDGES = Edges(0.5, 0.05)


class Fleet:
    """Two replicas: `chat-1` makes no step from the beginning, `chat-0` is well."""

    def __init__(self, gauges: Gauges, *, ready: bool = True, replicas: int = 2) -> None:
        self.loop = Loop(replicas=replicas)
        stuck = replace(self.loop.pods[1], ready=ready, ready_since=NOW - 3600 if ready else None)
        self.loop.pods = (self.loop.pods[0], stuck, *self.loop.pods[2:])
        self.gauges = {"chat-1": gauges}
        self.removed: list[str] = []

    def tick(self, **inputs: object) -> ControlDecision:
        """One tick of 5 s."""
        rows = [
            PodSample(pod.name, self.loop.now, Counters(steps=41.0), self.gauges[pod.name])
            if pod.name in self.gauges
            else sample(self.loop.now, pod.name)
            for pod in self.loop.pods
        ]
        decision = self.loop.tick(rows, **inputs)
        self.removed += decision.replace_pods
        return decision

    def run(self, seconds: float) -> ControlDecision:
        """Ticks for so long."""
        for _ in range(max(1, round(seconds / 5))):
            decision = self.tick()
        return decision


def test_a_pod_in_a_long_step_is_not_hung() -> None:
    """300 s without a finished step, and the engine does not say that it hangs."""
    fleet = Fleet(BUSY)
    decision = fleet.run(300)
    assert decision.signals.hung_pods == ()
    assert fleet.removed == []
    assert decision.signals.reporting_pods == 2, "it is capacity, and its load counts"


def test_requests_held_by_the_memory_cap_are_no_hang() -> None:
    """They wait, nothing runs, no step is made: by order."""
    fleet = Fleet(HELD)
    assert fleet.run(300).signals.hung_pods == ()
    assert fleet.removed == []


def test_an_engine_too_old_to_give_a_verdict_is_compatible_and_never_hung() -> None:
    """Without the series nothing is missing, and nothing is read into the absence."""
    series = [
        row
        for row in metrics_series(PodSample("chat-1", NOW, Counters(steps=41.0), BUSY), EDGES)
        if row[0] != "fleetkeeper_hung"
    ]
    old = sample_of("chat-1", NOW, series, EDGES, Source.DIRECT)
    assert old.missing == ()
    fleet = Fleet(old.gauges)
    decision = fleet.run(300)
    assert decision.signals.missing == ()
    assert decision.signals.hung_pods == ()
    assert fleet.removed == []
    assert "fleetkeeper_hung" in OPTIONAL
    assert "fleetkeeper_hung" not in REQUIRED


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "not ready"])
def test_a_pod_that_says_for_long_enough_that_it_hangs_is_replaced(ready: bool) -> None:
    """Its supervisor and its liveness probe come first. A hung engine is not ready, as a rule."""
    fleet = Fleet(BUSY._replace(hung=1.0), ready=ready)
    decision = fleet.run(HANG_S)
    assert decision.signals.hung_pods == ("chat-1",), "left out of capacity at once"
    assert decision.signals.known
    assert decision.signals.reporting_pods == 1
    report, _ = build_report(
        decision, Allocation(decision.want.replicas), fleet.loop.memory, fleet.loop.now
    )
    told = {row["type"]: row["reason"] for row in reported_status(report.report)["conditions"]}
    assert told["Degraded"] == "EngineHung"
    assert fleet.removed == []
    fleet.run(10)
    assert fleet.removed == ["chat-1"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.5, 2.0])
def test_a_verdict_that_is_neither_0_nor_1_is_none(value: float) -> None:
    fleet = Fleet(BUSY._replace(hung=value))
    fleet.run(300)
    assert fleet.removed == []


def test_a_verdict_that_was_taken_back_counts_from_its_return() -> None:
    """Each break begins the time anew: an engine that recovers is left alone."""
    fleet = Fleet(BUSY._replace(hung=1.0))
    for _ in range(5):
        fleet.run(HANG_S - 5)
        fleet.gauges["chat-1"] = BUSY
        fleet.tick()
        fleet.gauges["chat-1"] = BUSY._replace(hung=1.0)
    assert fleet.removed == []


def test_a_verdict_that_is_repeated_and_not_renewed_is_none() -> None:
    """Prometheus shows the last sample for minutes after scrapes fail."""
    loop = Loop(replicas=2)
    old = PodSample("chat-1", NOW, Counters(steps=41.0), BUSY._replace(hung=1.0))
    for _ in range(60):
        decision = loop.tick([sample(loop.now), old])
        assert not decision.replace_pods
    assert decision.signals.hung_pods == ()


def test_a_paused_service_keeps_its_hung_pod() -> None:
    fleet = Fleet(BUSY._replace(hung=1.0))
    fleet.loop.settings = replace(ControlSettings(), paused=True)
    fleet.run(600)
    assert fleet.removed == []


def test_pods_that_say_they_hang_take_turns() -> None:
    """One that is not confirmed (and so stays) must not keep the next from its turn."""
    fleet = Fleet(BUSY._replace(hung=1.0), replicas=4)
    fleet.gauges["chat-3"] = BUSY._replace(hung=1.0)
    fleet.run(600)
    assert fleet.removed[:4] == ["chat-1", "chat-3", "chat-1", "chat-3"]


@pytest.mark.parametrize(
    ("ready", "age_s", "counted"), [(True, 7200.0, 1), (False, 30.0, 1), (False, 7200.0, 0)]
)
def test_a_hung_pod_is_taken_off_the_supply_once(ready: bool, age_s: float, counted: int) -> None:
    """One that is not ready and old is no supply to begin with: one more replica is asked for, not two."""
    pods = (pod_view("chat-0"), pod_view("chat-1", ready=ready, age_s=age_s))
    supply = supply_of(pods, ("chat-1",), 180.0, NOW)
    assert supply.hung == counted
    assert supply.serving == 1
