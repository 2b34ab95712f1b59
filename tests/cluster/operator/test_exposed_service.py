"""A Service outside the cluster: settled without writes, and back again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import Live, World, condition, operator_world, service
from tests.support.operators.reason_checks import reports

SERVICE = CHILDREN[Kind.SERVICE]
ALLOWED = {"FLEETKEEPER_EXPOSED_SERVICE_TYPES": json.dumps(["NodePort", "LoadBalancer"])}


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-exposed") as found:
        yield found


def address(world: World) -> Live:
    return world.get("Service", "chat") or {}


async def until_type(world: World, kind: str) -> Live:
    await world.until(kind, lambda: address(world)["spec"]["type"] == kind)
    return address(world)


async def test_a_load_balancer_comes_and_goes_and_causes_no_write_in_between(world: World) -> None:
    """What the API server and other controllers fill in is theirs: ports, addresses, annotations."""
    operator = await world.operator(env=ALLOWED).start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    plain = address(world)
    assert plain["spec"]["type"] == "ClusterIP"
    await world.change(
        service={
            "type": "LoadBalancer",
            "loadBalancerClass": "example.com/internal",
            "annotations": {"example.com/scheme": "internal"},
        }
    )
    exposed = await until_type(world, "LoadBalancer")
    assert exposed["metadata"]["uid"] == plain["metadata"]["uid"]
    assert exposed["spec"]["clusterIP"] == plain["spec"]["clusterIP"]
    assert exposed["spec"]["loadBalancerClass"] == "example.com/internal"
    assert exposed["spec"]["ports"][0]["nodePort"]
    assert exposed["metadata"]["annotations"] == {"example.com/scheme": "internal"}
    await world.quiet()

    mark = world.mark()
    theirs = {
        "metadata": {"annotations": {"cloud.example.com/state": "programmed"}},
        "spec": {"externalTrafficPolicy": "Local"},  # which adds a healthCheckNodePort
    }
    changed = await world.patch(SERVICE, "chat", theirs)
    assert changed["spec"]["healthCheckNodePort"]
    await world.quiet()
    assert world.writes(mark) == []
    kept = address(world)
    assert kept["metadata"]["annotations"]["cloud.example.com/state"] == "programmed"
    assert kept["spec"]["ports"] == exposed["spec"]["ports"]

    await world.change(service={"type": None, "loadBalancerClass": None, "annotations": None})
    back = await until_type(world, "ClusterIP")
    assert back["spec"]["clusterIP"] == plain["spec"]["clusterIP"]
    assert "loadBalancerClass" not in back["spec"]
    assert "nodePort" not in back["spec"]["ports"][0]
    assert back["metadata"]["annotations"] == {"cloud.example.com/state": "programmed"}
    await world.quiet()
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}


async def test_a_class_that_changes_while_it_balances_is_refused_with_the_cause(
    world: World,
) -> None:
    """Kubernetes allows no change; by way of ClusterIP it is possible."""
    await world.operator(env=ALLOWED).start().leads()
    await world.create(
        service(replicas=1, service={"type": "LoadBalancer", "loadBalancerClass": "a"})
    )
    await world.ready()
    await world.change(service={"loadBalancerClass": "b"})
    await world.until(
        "refused", lambda: condition(world.fis(), "Stalled").get("reason") == "InvalidSpec"
    )
    assert "loadBalancerClass" in condition(world.fis(), "Stalled")["message"]
    await world.change(service={"type": "ClusterIP", "loadBalancerClass": None})
    await until_type(world, "ClusterIP")
    await world.change(service={"type": "LoadBalancer", "loadBalancerClass": "b"})
    assert (await until_type(world, "LoadBalancer"))["spec"]["loadBalancerClass"] == "b"
    await world.ready()


@pytest.mark.promise("exposed-services")
async def test_by_default_no_service_leaves_the_cluster(world: World) -> None:
    """The condition names the setting; the service that runs stays as it is."""
    await world.operator().start().leads()
    kinds = {"node-port": "NodePort", "balancer": "LoadBalancer"}
    for name in kinds:
        await world.create(service(name, replicas=1))
    await world.ready(*kinds)
    for name, kind in kinds.items():
        await world.change(name, service={"type": kind})
        await reports(world, name, "Stalled", "True", "InvalidSpec", "exposedServiceTypes")
        assert (world.get("Service", name) or {})["spec"]["type"] == "ClusterIP"
