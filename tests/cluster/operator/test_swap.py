"""An only replica is swapped on a real API server, by the real controller of Deployments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.gateway.gateway_world import MARKS
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import Live, World, condition, operator_world, service
from tests.support.operators.wake_marks import mark, operator_with_marks

GOOD_AFTER_S = 5.0
"""Of this operator; a minute otherwise."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-swap") as made:
        yield made


async def with_one_replica(world: World) -> OperatorProcess:
    """Start an operator and a service with one good replica, whose rollouts surge. No gateway can hold yet."""
    waits = {"reconcile.last_good.GOOD_AFTER_S": GOOD_AFTER_S}
    operator = await operator_with_marks(world, waits=waits)
    await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
    rollout = {"startupSeconds": 60, "strategy": "Surge"}
    await world.create(service(access="Gateway", replicas=1, rollout=rollout))
    await world.ready()
    await world.until(
        "ready for long enough", lambda: ready_for_s(world) > GOOD_AFTER_S + 2, GUARD_S
    )
    return operator


def ready_for_s(world: World) -> float:
    """Return how long the service has been ready, by this machine's clock."""
    since = condition(world.fis(), "Ready")["lastTransitionTime"]
    return (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()


def sleep_of(world: World) -> Live:
    return (world.fis() or {})["status"].get("sleep") or {}


def template(world: World) -> str:
    """Return our annotation on the live template."""
    live = world.get("Deployment", "chat") or {}
    return str(live["spec"]["template"]["metadata"]["annotations"]["fleetkeeper.io/template-hash"])


def surge(world: World) -> object:
    live = world.get("Deployment", "chat") or {}
    return live["spec"]["strategy"]["rollingUpdate"]["maxSurge"]


def pods(world: World) -> set[str]:
    """Return the UIDs of the pods that are not ending."""
    return {
        live["metadata"]["uid"]
        for (kind, _), live in world.objects.items()
        if kind == "Pod" and "deletionTimestamp" not in live["metadata"]
    }


def is_swapping(world: World) -> bool:
    return sleep_of(world).get("state") == "Swapping"


def is_awake(world: World) -> bool:
    return "number" in sleep_of(world) and "state" not in sleep_of(world)


async def test_the_status_comes_first_also_for_the_next_leader(world: World) -> None:
    """Without a gateway the pod stays. Then Swapping, the Deployment without surge, and awake."""
    operator = await with_one_replica(world)
    old, before = template(world), pods(world)
    resources = {"cpu": "110m"}
    await world.change(resources=resources, rollout={"strategy": "Swap"})
    await world.until(
        "waits", lambda: condition(world.fis(), "Progressing").get("reason") == "SwapWaits"
    )
    await world.quiet()
    assert (template(world), pods(world)) == (old, before)

    await mark(world)
    await world.until("swapping", lambda: is_swapping(world))
    operator.kill()
    assert (template(world), surge(world), pods(world)) == (old, 1, before)
    since = world.mark()
    await operator.start().leads()
    await world.until("written", lambda: template(world) != old)
    assert surge(world) == 0
    assert is_swapping(world)
    await world.until("awake", lambda: is_awake(world))
    assert not pods(world) & before
    assert sleep_of(world)["number"] == 1
    assert len(sleep_of(world)["startSeconds"]) == 1
    await world.ready()
    await world.quiet()
    written = [item.resource for item in world.writes(since)]
    assert written.count("deployments") == 1
    assert operator.tracebacks() == []


@pytest.mark.exhaustive
async def test_a_revision_that_no_node_fits_returns_within_the_same_swap(world: World) -> None:
    operator = await with_one_replica(world)
    await mark(world)
    await world.change(rollout={"strategy": "Swap"})
    await world.until("no surge", lambda: surge(world) == 0)
    good = template(world)
    await world.change(placement={"nodeSelector": {"no": "such-node"}})
    await world.until("swapping", lambda: is_swapping(world))
    await world.until("written", lambda: template(world) != good)
    await world.until("back", lambda: template(world) == good, GUARD_S)
    assert is_swapping(world)
    await world.until("awake", lambda: is_awake(world))
    await world.until(
        "rolled back", lambda: condition(world.fis(), "Stalled").get("reason") == "RolledBack"
    )
    assert sleep_of(world)["number"] == 1
    await world.until(
        "available", lambda: condition(world.fis(), "Available").get("status") == "True"
    )
    assert (world.fis() or {})["status"]["rollback"]["reason"] == "Unschedulable"
    await world.quiet()
    since = world.mark()
    await world.quiet(12.0)
    assert world.writes(since) == []
    assert operator.tracebacks() == []
