"""The cost of a tick, from Prometheus' JSON to decisions, in units of processor time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from fleetkeeper.adapters.prometheus.answers import Fan
from fleetkeeper.adapters.prometheus.queries import TIMES
from fleetkeeper.autoscale.arbitrate import arbitrate
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings
from fleetkeeper.common.budget import Budget
from fleetkeeper_contract.step_terms import StepSums
from tests.support.autoscale.control_cases import NOW, pod_view, sample
from tests.support.autoscale.engine_metrics import metrics_series
from tests.support.processor_units import units_of

SERVICES = 200
PODS = 2
TICKS = 4
"""Until a decision has what it needs of the past."""
EDGES = Edges(0.5, 0.05)
MAX_TICK = 1500
"""Units: 0.75 s where this was written, three times what a quarter of a core has for 200 of 1,000 services."""


def scraped(now: float) -> str:
    """Prometheus' response: the series of one pod, under every pod's name."""
    shape = sample(now)
    series = list(metrics_series(shape, EDGES))
    rows: list[dict[str, Any]] = [
        {
            "metric": labels | {"__name__": name, "namespace": "team", "pod": pod},
            "value": [now, str(value)],
        }
        for pod in pod_names()
        for name, labels, value in series
    ]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})


def pod_names() -> list[str]:
    """All pods."""
    return [f"s{service}-{pod}" for service in range(SERVICES) for pod in range(PODS)]


def samples_of(body: str, now: float) -> dict[tuple[str, str], PodSample]:
    """From the text of the answers to samples."""
    fan = Fan({("team", pod): EDGES for pod in pod_names()})
    fan.take(
        TIMES,
        [
            {"metric": {"namespace": "team", "pod": pod}, "value": [now, str(now)]}
            for pod in pod_names()
        ],
    )
    answer: dict[str, Any] = json.loads(body)
    fan.take("all", answer["data"]["result"])
    return dict(fan.reading().samples)


@pytest.mark.exhaustive
def test_a_tick_costs_a_fraction_of_a_core() -> None:
    """200 services with 2 pods each: JSON, fan-out, decisions, status."""
    memories = [ControlMemory() for _ in range(SERVICES)]
    views = [
        tuple(pod_view(f"s{service}-{pod}") for pod in range(PODS)) for service in range(SERVICES)
    ]
    times = itertools.count(int(NOW), 5)
    known = []

    def tick() -> None:
        now = float(next(times))
        found = samples_of(scraped(now), now)
        decided = []
        for number, pods in enumerate(views):
            rows = tuple(found["team", pod.name] for pod in pods)
            inputs = ControlInputs(
                "team", f"s{number}", ControlSettings(), PODS, NOW - 7200, pods, rows
            )
            decided.append(decide_service(inputs, memories[number], now))
        allocations = arbitrate((decision.want for decision, _ in decided), Budget())
        for number, (decision, memory) in enumerate(decided):
            _, memories[number] = build_report(
                decision, allocations[decision.want.key], memory, now
            )
        assert all(decision.signals.ready_pods == PODS for decision, _ in decided)
        known.append(all(decision.signals.known for decision, _ in decided))

    for _ in range(TICKS):
        tick()
    assert known[-1]
    units = units_of(tick, MAX_TICK)
    print(f"{units:.0f} units")
    assert units <= MAX_TICK


def test_a_sample_survives_the_way_through_json() -> None:
    """Decisions see the series that the engine exports."""
    row = samples_of(scraped(NOW), NOW)["team", "s0-0"]
    shape = sample(NOW)
    assert row.counters == shape.counters
    assert row.gauges == shape.gauges
    assert row.missing == ()
    assert row.decode == row.prefill == StepSums()
