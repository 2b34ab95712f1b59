"""The gauges of a service after a tick."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.autoscale.gauges import gauges_of
from tests.support.control_cases import Loop, pod_view


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
