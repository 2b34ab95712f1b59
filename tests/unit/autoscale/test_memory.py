"""The memory of a service: recovered from the status after a restart, and bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.memory import (
    ControlMemory,
    memory_from_status,
)
from fleetkeeper.autoscale.rules.source_breaker import decide_source_breaker
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.values import CAUSE_UNKNOWN, Remedy
from fleetkeeper_contract import rfc3339
from tests.support.autoscale.control_cases import NOW, Loop, reported, reported_status


def test_a_lost_prometheus_stays_lost_over_a_restart() -> None:
    """No second event is recorded, and the first answer closes it."""
    memory = memory_from_status({"breaker": {"control": "Closed", "source": "Open"}}, 1, 80, 1000.0)
    assert memory.breakers.source.is_open
    assert (
        decide_source_breaker(memory.breakers.source, lost=True, now=1005.0)
        is memory.breakers.source
    )
    assert not decide_source_breaker(memory.breakers.source, lost=False, now=1010.0).is_open


def test_memory_is_rebuilt_from_the_status() -> None:
    """Limits, breakers, remedy and decisions survive a restart; open breakers are open from now."""
    loop = Loop()
    report = reported(loop, loop.steady(30))
    status = {**reported_status(report.report), "observedGeneration": 1}
    rebuilt = memory_from_status(status, 1, 80, NOW)
    assert rebuilt.batch.limits == loop.memory.batch.limits
    assert rebuilt.changes == loop.memory.changes
    assert rebuilt.shown_scaling == loop.memory.shown_scaling
    assert rebuilt.breakers.control.is_closed
    status["breaker"] = {"control": "HalfOpen", "reason": "Oscillating", "load": {"batch": "Open"}}
    rebuilt = memory_from_status(status, 1, 80, NOW)
    assert rebuilt.breakers.control.state is BreakerState.OPEN
    assert rebuilt.breakers.control.last_good == loop.memory.batch.limits
    assert rebuilt.breakers.load.batch.state is BreakerState.OPEN


def test_a_new_leader_goes_on_shedding_until_it_has_measured() -> None:
    """It has no rates in its first ticks: an open tier stays open, and batch keeps its floor."""
    breaker = {"control": "Closed", "source": "Closed", "load": {"batch": "Open"}}
    loop = Loop(started=NOW, memory=memory_from_status({"breaker": breaker}, 1, 80, NOW))
    for _ in range(6):
        decision = loop.tick()
        assert loop.memory.breakers.load.batch.state is BreakerState.OPEN
        assert decision.admission.admit == (1.0, 1.0, 0.05)
        assert not decision.events
    loop.tick()
    assert loop.memory.breakers.load.is_closed, "without measurements nothing is shed"


@pytest.mark.parametrize(
    ("reason", "message", "cause"),
    [
        ("SignalsLost", "No signals for 3 ticks", "No signals for 3 ticks"),
        ("Overload", "Pressure 1.20 above 0.9", CAUSE_UNKNOWN),
        ("PrometheusLost", "Prometheus returns no fresh samples", CAUSE_UNKNOWN),
    ],
)
def test_the_cause_of_an_open_control_breaker_is_the_one_that_the_status_explains(
    reason: str, message: str, cause: str
) -> None:
    """The status explains the breaker that changed last."""
    breaker = {"control": "Open", "source": "Closed", "reason": reason, "message": message}
    assert memory_from_status({"breaker": breaker}, 1, 80, NOW).breakers.control.detail == cause


def test_a_remedy_survives_a_restart_of_the_operator_not_of_the_spec() -> None:
    """Until the generation changes."""
    loop = Loop(settings=ControlSettings(generation=7))
    loop.memory = replace(loop.memory, remedy=Remedy("CUDAOutOfMemory", 128, 75, 3, 7, NOW))
    status = {**reported_status(reported(loop, loop.steady(3)).report), "observedGeneration": 7}
    assert memory_from_status(status, 7, 80, NOW).remedy == Remedy(
        "CUDAOutOfMemory", 128, 75, 3, 7, NOW
    )
    assert memory_from_status(status, 8, 80, NOW).remedy is None


HOSTILE_STATUS = [
    {},
    {"batching": None},
    {"batching": []},
    {"batching": {"sequences": "many", "tokens": -1}},
    {"breaker": {"control": 7, "load": "x"}},
    {"decisions": [1, None, {"time": 3}]},
    {"scaling": {"since": "yesterday"}},
    {"remedy": {"maxSequences": True}},
    {"memory": {"peakPercent": "x"}},
    {"decisions": {}},
]


@pytest.mark.parametrize("status", HOSTILE_STATUS, ids=str)
def test_a_malformed_status_counts_as_absent(status: dict[str, object]) -> None:
    """A user edited the status: nothing fails, and the loop runs on."""
    memory = memory_from_status(status, 1, 80, NOW)
    loop = Loop(memory=memory)
    assert loop.steady(3).replicas.value == 2


def test_times_round_trip() -> None:
    """RFC 3339, whole seconds."""
    assert rfc3339.format(0.0) == "1970-01-01T00:00:00Z"
    assert rfc3339.parse(rfc3339.format(NOW)) == NOW
    assert rfc3339.parse("nonsense") is None


def test_the_memory_is_small() -> None:
    """A day of ticks does not make it grow."""
    loop = Loop()
    loop.steady(100)
    early = memory_size(loop.memory)
    loop.steady(600)
    assert memory_size(loop.memory) <= 1.5 * early


def memory_size(memory: ControlMemory) -> int:
    """The length of its text, as a measure."""
    return len(repr(memory))
