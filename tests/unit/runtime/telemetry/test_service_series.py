"""The series of single services: from the leader's reconciles and ticks, as long as the service exists."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.telemetry.service_series import ServiceSeries
from tests.support.operators.isolation_world import Operator

CHAT, EMBED = Key("team-a", "chat"), Key("team-a", "embed")
OURS = ("service_namespace", "inference_service")


def _series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric by the values of their labels, those of the service first."""
    return {
        tuple(
            sample.labels[label] for label in (*OURS, *sorted(sample.labels.keys() - set(OURS)))
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == f"fleetkeeper_{name}"
    }


def _of(operator: Operator, name: str, service: str) -> dict[tuple[str, ...], float]:
    found = _series(operator.metrics.registry, name)
    return {labels[2:]: value for labels, value in found.items() if labels[1] == service}


def _condition(operator: Operator, service: str, kind: str) -> str:
    """The status of a condition by its gauges."""
    found = {
        sample.labels["status"]: sample.value
        for family in text_string_to_metric_families(
            generate_latest(operator.metrics.registry).decode()
        )
        for sample in family.samples
        if sample.name == "fleetkeeper_service_condition"
        and (sample.labels["inference_service"], sample.labels["type"]) == (service, kind)
    }
    assert sorted(found.values()) == [0.0, 0.0, 1.0]
    return next(status for status, value in found.items() if value)


def test_counters_add_up_by_service_and_begin_at_zero() -> None:
    registry = CollectorRegistry()
    series = ServiceSeries(registry)
    label = (("subject", "replicas"),)
    for by in (0.0, 1.0, 1.0):
        series.count(CHAT, [("service_decisions", label, by)])
    series.count(EMBED, [("service_decisions", label, 0.0)])
    assert _series(registry, "service_decisions_total") == {
        ("team-a", "chat", "replicas"): 2.0,
        ("team-a", "embed", "replicas"): 0.0,
    }
    series.forget(CHAT)
    assert _series(registry, "service_decisions_total").keys() == {("team-a", "embed", "replicas")}


def test_a_gauge_that_is_not_given_anymore_is_gone() -> None:
    """So a condition has one reason."""
    registry = CollectorRegistry()
    series = ServiceSeries(registry)
    for reason in ("Starting", "AllReplicasReady"):
        series.show(CHAT, [("service_condition_reason", (("reason", reason),), 1.0)])
    assert _series(registry, "service_condition_reason").keys() == {
        ("team-a", "chat", "AllReplicasReady")
    }


@pytest.mark.slow
async def test_the_series_follow_a_service_until_it_is_deleted() -> None:
    """Conditions as in the status, bounds as in the spec, decisions and objectives as in the loop."""
    operator = await Operator("bad", "good").started()
    for name in ("bad", "good"):
        for kind in ("Available", "Ready", "Degraded", "MetricsAvailable", "ScalingLimited"):
            status, reason = operator.condition(name, kind)
            assert _condition(operator, name, kind) == status.lower()
            assert (reason, kind) in _of(operator, "service_condition_reason", name)
        assert set(_of(operator, "service_decisions_total", name)) == {
            ("replicas",), ("limits",), ("breaker",), ("restart",), ("remedy",)
        }  # fmt: skip
        assert len(_of(operator, "objective_ticks_total", name)) == 4

    operator.change("bad", scaling={"minReplicas": 2, "maxReplicas": 7})
    await operator.round()
    assert _of(operator, "service_min_replicas", "bad") == {(): 2.0}
    assert _of(operator, "service_max_replicas", "bad") == {(): 7.0}

    del operator.server.services["bad"]
    await operator.round()
    text = generate_latest(operator.metrics.registry).decode()
    assert 'inference_service="good"' in text
    assert 'inference_service="bad"' not in text
