"""Namespaces end: everything goes, nothing is stuck, whether the operator runs or not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import DEPLOYMENT
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, is_ready, operator_world, service


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-end") as found:
        yield found


def _is_gone(plane: ControlPlane, namespace: str) -> bool:
    return plane.get(f"/api/v1/namespaces/{namespace}") is None


@pytest.mark.parametrize("runs", [True, False], ids=["operator up", "operator down"])
async def test_a_namespace_ends_with_all_that_is_in_it(world: World, runs: bool) -> None:
    """No finalizer of ours holds it, and no child is made again in it."""
    operator = await world.operator().start().leads()
    await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
    await world.create(service("other", replicas=1))
    await world.ready("chat", "other")
    if not runs:
        operator.kill()
    world.plane.kubectl("delete", "namespace", world.namespace, "--wait=false")
    await world.until("namespace gone", partial(_is_gone, world.plane, world.namespace), GUARD_S)
    await world.until("both gone", lambda: world.fis() is None and world.fis("other") is None)


async def test_one_operator_serves_all_namespaces(world: World) -> None:
    """Cluster-wide: each service gets its children at home, and a namespace may end under it."""
    other = f"{world.namespace}-b"
    plane = world.plane
    plane.kubectl("create", "namespace", other)
    with world.cluster_rights():
        operator = await world.operator().start(FLEETKEEPER_NAMESPACES="[]").leads()
        mark = world.mark()
        await world.create(service(replicas=1))
        manifest = service(replicas=1)
        manifest["metadata"]["namespace"] = other
        plane.kubectl("create", "-f", "-", input=json.dumps(manifest))
        await world.ready()
        path = f"/apis/fleetkeeper.io/v1alpha1/namespaces/{other}/inferenceservices/chat"
        await world.until("the other is ready", lambda: is_ready(plane.get(path)))
        await world.quiet()
        # Other tests may have left services on this control plane; they are served too.
        homes = Counter(write.namespace for write in world.writes(mark))
        assert all(1 <= homes[home] <= 10 for home in (other, world.namespace)), homes

        deployment = plane.get(DEPLOYMENT.path(other, "chat")) or {}
        plane.kubectl("-n", other, "delete", "deployment", "chat")
        await world.until(
            "deployment back",
            lambda: (
                (plane.get(DEPLOYMENT.path(other, "chat")) or deployment)["metadata"]["uid"]
                != deployment["metadata"]["uid"]
            ),
        )
        plane.kubectl("delete", "namespace", other, "--wait=false")
        await world.until("namespace gone", partial(_is_gone, plane, other), GUARD_S)
        assert operator.alive
        assert is_ready(world.fis())
