"""The gauges of a service after a tick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.decided import SUBJECTS, Decided
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.gauges import counts_of, gauges_of
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from tests.support.autoscale.control_cases import Loop, pod_view


def _replicas(loop: Loop) -> dict[str, float]:
    """The gauges of replicas by kind, after a tick."""
    gauges = gauges_of(loop.steady(1), loop.replicas)
    return {labels[0][1]: value for name, labels, value in gauges if name == "decision_replicas"}


def test_ready_replicas_are_those_that_are_not_being_deleted() -> None:
    pods = (
        pod_view("chat-0"),
        pod_view("chat-1", ready=False),
        replace(pod_view("chat-2"), deleting=True),
    )
    shown = _replicas(Loop(replicas=2, pods=pods))
    assert (shown["live"], shown["ready"]) == (2.0, 1.0)


def test_a_service_without_pods_has_no_ready_replica() -> None:
    pods = (pod_view("chat-0", ready=False),)
    assert _replicas(Loop(replicas=1, pods=pods))["ready"] == 0.0


def test_a_service_that_sleeps_shows_no_fault() -> None:
    """What alerts read: no open breaker, no pressure, no missing replica, and no rate for batches."""
    loop = Loop(replicas=1)
    loop.steady(20)
    loop.replicas, loop.pods = 0, ()
    loop.settings = replace(loop.settings, activation=Activation(State.ASLEEP, 0))
    decision = [loop.tick() for _ in range(60)][-1]
    gauges = {(name, *labels): value for name, labels, value in gauges_of(decision, 0)}
    of = {
        name: {value for key, value in gauges.items() if key[0] == name}
        for name in ("breaker_state", "decision_replicas", "pressure_ratio")
    }
    assert of == {"breaker_state": {0.0}, "decision_replicas": {0.0}, "pressure_ratio": {0.0}}
    assert ("model_batch_tokens_per_second",) not in gauges


def _counts(decision: ControlDecision, *subjects: str) -> dict[tuple[str, ...], float]:
    """The increments of a tick with decisions about these subjects, by the values of their labels."""
    made = [Decided(subject, "", "", "", "", "") for subject in subjects]
    found = counts_of(decision, made)
    return {tuple(text for _, text in labels): value for _, labels, value in found}


def test_a_decision_counts_by_its_subject() -> None:
    counts = _counts(Loop().steady(1), "replicas", "breaker", "breaker")
    decided = {subject: counts[subject,] for subject in SUBJECTS}
    assert decided == {"replicas": 1, "limits": 0, "breaker": 2, "restart": 0, "remedy": 0}


@pytest.mark.parametrize(("objective_s", "result"), [(10.0, "met"), (1e-9, "missed")])
def test_a_tick_with_requests_meets_or_misses_each_objective(
    objective_s: float, result: str
) -> None:
    settings = ControlSettings(
        queue_wait_objective_s=objective_s, batch_time_objective_s=objective_s
    )
    decision = Loop(settings=settings).steady(20)
    assert decision.signals.queue_wait_s > 1e-9
    counts = _counts(decision)
    for objective in ("queue_wait", "batch_time"):
        for other in ("met", "missed"):
            assert counts[objective, other] == float(other == result)


def test_a_tick_without_signals_counts_for_no_objective() -> None:
    counts = _counts(Loop().tick(()))
    assert {counts[labels] for labels in counts if len(labels) == 2} == {0.0}
