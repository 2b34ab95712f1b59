"""Engines that demand no grant although their service does: named after three minutes, and not before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.conditions import Reason
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import OPEN_ENGINE_S
from fleetkeeper.autoscale.memory import ControlMemory, memory_from_status
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import ControlSettings
from tests.support.autoscale.control_cases import NOW, Loop

DEMANDS = ControlSettings(demands_grants=True)
TICKS = round(OPEN_ENGINE_S / 5)


def samples(loop: Loop, **demanded: float) -> list[PodSample]:
    """Samples of every pod; `chat_1=1.0` says what the pod chat-1 demands."""
    return [
        replace(
            row,
            gauges=row.gauges._replace(
                grants_demanded=demanded.get(row.pod.replace("-", "_"), 0.0)
            ),
        )
        for row in loop.samples(None)
    ]


def open_pods(loop: Loop, ticks: int = 1, **demanded: float) -> tuple[str, ...]:
    """What the report names after some ticks."""
    for _ in range(ticks):
        decision = loop.tick(samples(loop, **demanded))
    report, _ = build_report(decision, Allocation(2), loop.memory, loop.now)
    return report.report.open_pods


def test_an_engine_that_demands_nothing_for_three_minutes_is_named() -> None:
    """0 is also the value of an engine that is too old to export the metric."""
    loop = Loop(settings=DEMANDS)
    assert open_pods(loop, TICKS, chat_0=1.0) == ()
    assert open_pods(loop, chat_0=1.0) == ("chat-1",)
    assert open_pods(loop, chat_0=1.0, chat_1=1.0) == ()
    assert open_pods(loop, TICKS, chat_0=1.0) == ()


def test_a_demand_that_comes_in_time_is_no_problem_and_starts_the_time_again() -> None:
    loop = Loop(settings=DEMANDS)
    assert open_pods(loop, TICKS - 1, chat_0=1.0) == ()
    assert open_pods(loop, chat_0=1.0, chat_1=1.0) == ()
    assert open_pods(loop, TICKS, chat_0=1.0) == ()


def test_a_pod_without_samples_keeps_its_time_and_one_that_is_not_ready_has_none() -> None:
    loop = Loop(settings=DEMANDS)
    open_pods(loop, TICKS, chat_0=1.0)
    for _ in range(5):
        loop.tick([row for row in samples(loop, chat_0=1.0) if row.pod == "chat-0"])
    assert open_pods(loop, chat_0=1.0) == ("chat-1",)
    loop.pods = tuple(replace(pod, ready=pod.name == "chat-0") for pod in loop.pods)
    assert open_pods(loop, chat_0=1.0) == ()


@pytest.mark.parametrize("ticks", [1, 2 * TICKS])
def test_an_open_service_has_no_open_engines(ticks: int) -> None:
    assert open_pods(Loop(), ticks) == ()


def test_the_time_begins_with_the_demand() -> None:
    loop = Loop()
    open_pods(loop, 2 * TICKS)
    loop.settings = DEMANDS
    assert open_pods(loop, TICKS) == ()
    assert open_pods(loop) == ("chat-0", "chat-1")


def test_a_new_leader_goes_on_with_what_the_status_says() -> None:
    """Or the condition would go for three minutes at each restart of the operator."""
    reason = str(Reason.GRANTS_NOT_DEMANDED)
    status = {"conditions": [{"type": "Degraded", "status": "True", "reason": reason}]}
    found = memory_from_status(status, 1, 80, NOW)
    assert found.were_open
    loop = Loop(settings=DEMANDS, memory=found)
    loop.tick([])
    assert open_pods(loop, chat_0=1.0) == ("chat-1",)
    assert not memory_from_status({}, 1, 80, NOW).were_open
    assert ControlMemory().open_engines == {}
