"""What breaks under a fleet, and what the fleet and its operator make of it."""

from __future__ import annotations

import json
import uuid

import pytest

from fleetkeeper_local.demo.fleet import Fleet, condition_of
from fleetkeeper_local.demo.inject import freeze_engine
from fleetkeeper_local.demo.installation import NAMESPACE, Installation, ensure_namespace
from fleetkeeper_local.node import Node
from service_world import (
    complete,
    failures,
    in_container,
    steady,
    tiny,
)

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("calm_operator")]

EAT_MEMORY = """
import os
from pathlib import Path
# The supervisor shall be the kernel's choice, as when it is the one that grows.
Path("/proc/1/oom_score_adj").write_text("1000")
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20)) * 64)
"""


def _says(fleet: Fleet, words: str) -> bool:
    return any(
        words in str(event.get("message"))
        for event in fleet.cluster.events(fleet.namespace, "tiny")
    )


def test_a_lost_prometheus_opens_its_breaker_and_moves_nothing(fleet: Fleet, node: Node) -> None:
    """Pods are read directly, replicas stay, requests are answered; and back again."""
    before = [pod.identity for pod in fleet.engines()]

    def source() -> str:
        return str((fleet.status().get("breaker") or {}).get("source", ""))

    fleet.until(lambda: source() == "Closed", "metrics by Prometheus")
    with steady(fleet, 2.0, seed=11) as traffic:
        node.processes.stop(["prometheus"])
        try:
            fleet.until(lambda: source() == "Open", "the breaker opens")
            fleet.until(lambda: _says(fleet, "Prometheus gives no fresh samples"), "the event")
            available = fleet.condition("MetricsAvailable")
            assert (available["status"], available["reason"]) == ("True", "FreshMetrics")
        finally:
            assert node.up() is True
        fleet.until(lambda: source() == "Closed", "the breaker closes")
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in fleet.engines()] == before
    assert fleet.live()["status"]["scaling"]["desired"] == 1


def test_a_hung_engine_is_replaced_and_told_apart(fleet: Fleet) -> None:
    """A core that stopped with its port open: not ready soon, restarted, and the reason is known."""
    (pod,) = fleet.engines()
    with steady(fleet, 1.0, seed=12) as traffic:
        fleet.until(lambda: len(traffic.samples) >= 3, "some answers")
        freeze_engine(pod)
        fleet.until(lambda: not fleet.engines()[0].ready, "the frozen pod is not ready")
        fleet.until(
            lambda: (
                fleet.condition("Ready").get("reason") == "EngineHung"
                or fleet.condition("Degraded").get("reason") == "EngineHung"
            ),
            "the reason",
        )
        fleet.until(lambda: fleet.engines()[0].identity != pod.identity, "a new engine")
    fleet.await_ready(1)
    assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3


def test_a_pod_that_ran_out_of_its_memory_is_told_apart(fleet: Fleet) -> None:
    """The kernel ends the supervisor itself: OOMKilled is read from the pod, and it serves again."""
    (pod,) = fleet.engines()
    with in_container(fleet, pod, EAT_MEMORY) as eater:
        fleet.until(lambda: fleet.engines()[0].restarts > pod.restarts, "the kernel acts")
        eater.kill()
    assert fleet.engines()[0].ended == "OOMKilled"
    fleet.until(
        lambda: (
            fleet.condition("Ready").get("reason") == "HostOutOfMemory"
            or fleet.is_ready(1)
            or _says(fleet, "memory")
        ),
        "the reason",
    )
    assert _says(fleet, "memory")
    fleet.await_ready(1)


def test_a_tenants_namespace_goes_cleanly(product: Installation) -> None:
    """With a service in it: everything is gone, nothing waits for anybody."""
    cluster = product.cluster
    tenant = f"leaving-{uuid.uuid4().hex[:6]}"
    ensure_namespace(cluster, tenant)
    fleet = Fleet(cluster, tenant, "tiny")
    fleet.kubectl("apply", "-f", "-", given=json.dumps(tiny(replicas=0)))
    fleet.until(lambda: fleet.condition("Ready").get("reason") == "Stopped", "stopped")
    assert "deployment.apps/tiny" in fleet.kubectl("get", "deployments", "-o", "name")
    cluster.kubectl("delete", "namespace", tenant, "--timeout=120s", timeout_s=130)
    assert tenant not in cluster.namespaces()


def test_an_uninstalled_operator_leaves_services_and_their_engines(
    fleet: Fleet, product: Installation
) -> None:
    """crds.keep: the CRD stays, and with it every service; engines serve on; it can come back."""
    before = [pod.identity for pod in fleet.engines()]
    generation = fleet.live()["metadata"]["generation"]
    product.uninstall()
    try:
        assert product.operators() == []
        assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3
        live = fleet.live()
        assert condition_of(live, "Ready")["status"] == "True"
        assert live["metadata"]["generation"] == generation
    finally:
        product.install()
    names = product.cluster.kubectl("-n", NAMESPACE, "get", "secrets", "-o", "name")
    assert "secret/fleetkeeper-control-keys" in names
    fleet.await_ready(1)
    assert [pod.identity for pod in fleet.engines()] == before
