"""A suspended service returns with its number of replicas, also by another process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, condition, operator_world, service


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-suspend") as found:
        yield found


def replicas(world: World) -> int:
    return int((world.get("Deployment", "chat") or {})["spec"]["replicas"])


async def test_the_number_survives_the_operator_that_stored_it(world: World) -> None:
    """In Advisory mode only the Deployment has the number, and suspend takes it away."""
    operator = await world.operator().start().leads()
    await world.create(service(replicas=3))
    await world.ready()
    await world.change(replicas=None, scaling={"mode": "Advisory"})
    await world.ready()
    assert replicas(world) == 3

    await world.change(suspend=True)
    await world.until(
        "suspended", lambda: condition(world.fis(), "Ready").get("reason") == "Suspended"
    )
    await world.until("no replicas", lambda: replicas(world) == 0)
    await world.quiet()
    found = world.plane.kubectl("-n", world.namespace, "get", "fis", "chat").split()
    assert found[found.index("chat") :][:4] == ["chat", "0/0", "0", "true"]
    operator.kill()

    await operator.start().leads()
    mark = world.mark()
    await world.quiet()
    assert world.writes(mark) == []
    await world.change(suspend=False)
    await world.until("resumed", lambda: replicas(world) == 3)
    await world.ready()
    await world.quiet()
    assert replicas(world) == 3
    assert "suspendedReplicas" not in (world.fis() or {})["status"]
