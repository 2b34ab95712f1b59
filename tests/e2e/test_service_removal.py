"""A tenant that goes, with everything."""

from __future__ import annotations

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import processes_of
from fleetkeeper_local.demo.installation import Installation
from node_world import until
from service_world import steady, tracebacks

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("calm_operator")]


def test_a_tenants_namespace_goes_cleanly_while_it_serves(
    fleet: Fleet, product: Installation
) -> None:
    """With a service in it at work: everything goes, down to the processes, and nothing waits for anybody."""
    pods = [*fleet.engines(), *fleet.pods("router")]
    assert all(processes_of(pod.uid, lambda _: True) for pod in pods)
    cluster, tenant = product.cluster, fleet.namespace
    with steady(fleet, 2.0, seed=15) as traffic:
        until(lambda: len(traffic.samples) >= 5, "answers")
        cluster.kubectl("delete", "namespace", tenant, "--timeout=120s", timeout_s=130)
    assert tenant not in cluster.namespaces()
    until(
        lambda: not any(processes_of(pod.uid, lambda _: True) for pod in pods), "no process is left"
    )


def test_the_operator_never_lost_its_temper(product: Installation) -> None:
    """The scan of the log sees tracebacks, and sees none in what was said so far."""
    assert tracebacks('{"level": "error", "event": "x"}') != []
    assert tracebacks("Traceback (most recent call last):") != []
    assert tracebacks(product.logs()) == []
