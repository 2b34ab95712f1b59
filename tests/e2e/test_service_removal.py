"""What is taken away, and what stays: the release without its services, then a tenant with everything."""

from __future__ import annotations

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import processes_of
from fleetkeeper_local.demo.installation import Installation
from tests.support.node.node_world import until
from tests.support.node.service_world import (
    await_operators,
    failures,
    service_fleet,
    simulated,
    steady,
    tracebacks,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]

CRD = "customresourcedefinition/inferenceservices.fleetkeeper.io"


@pytest.mark.promise("operator-outage", "not-in-path")
def test_an_uninstalled_operator_leaves_services_serving_and_can_come_back(
    fleet: Fleet, product: Installation
) -> None:
    """crds.keep: under load nothing is noticed; installed again, it takes over and restarts nothing."""
    before = [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]]
    kept = _kept(product)
    with steady(fleet, 2.0, seed=14) as traffic:
        product.uninstall()
        try:
            until(lambda: not product.operators(), "the operators are gone")
            seen = len(traffic.samples)
            until(lambda: len(traffic.samples) >= seen + 10, "answers without an operator")
            assert _kept(product) == kept
        finally:
            product.install()
        await_operators(product)
        fleet.change({"scaling": {"maxReplicas": 3}})  # told by whoever looks after it again
        fleet.await_ready(1)
        fleet.change({"scaling": {"maxReplicas": 2}})
    assert failures(traffic.samples) == []
    assert _kept(product) == kept
    assert [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]] == before


def _kept(product: Installation) -> list[str]:
    """The UIDs of what outlives a release: the CRD and the control keys."""
    secret = ("-n", product.namespace, "get", "secret/fleetkeeper-control-keys")
    return [
        product.cluster.kubectl(*found, "-o", "jsonpath={.metadata.uid}")
        for found in (("get", CRD), secret)
    ]


def test_a_tenants_namespace_goes_cleanly_while_it_serves(product: Installation) -> None:
    """With a service in it at work: everything goes, down to the processes, and nothing waits."""
    cluster = product.cluster
    with service_fleet(product, simulated()) as fleet:  # later tests want the shared one
        fleet.await_ready(1)
        pods = [*fleet.engines(), *fleet.pods("router")]
        assert all(processes_of(pod.uid, lambda _: True) for pod in pods)
        with steady(fleet, 2.0, seed=15) as traffic:
            until(lambda: len(traffic.samples) >= 5, "answers")
            cluster.kubectl("delete", "namespace", fleet.namespace, "--timeout=300s", timeout_s=320)
        assert fleet.namespace not in cluster.namespaces()
    until(
        lambda: not any(processes_of(pod.uid, lambda _: True) for pod in pods), "no process is left"
    )
    await_operators(product)


def test_the_operator_never_lost_its_temper(product: Installation) -> None:
    """The scan of the log sees tracebacks, and sees none in what was said so far."""
    assert tracebacks('{"level": "error", "event": "x"}') != []
    assert tracebacks("Traceback (most recent call last):") != []
    assert tracebacks(product.logs()) == []
