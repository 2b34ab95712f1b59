"""The GPU budget on a real API server: whoever asks, no more is created than it allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import EVENT, INFERENCE_SERVICE, REPLICA_SET
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, condition, operator_world, service

BUDGET = 4
SERVICES: dict[str, dict[str, Any]] = {
    "pinned": {"replicas": 3},
    "external": {"replicas": 3, "scaling": {"mode": "External"}},
    "minimum": {"scaling": {"minReplicas": 4, "maxReplicas": 6}},
}
"""10 replicas in all, one GPU each."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "gpu-budget") as found:
        yield found


def gpus(world: World) -> int:
    """GPUs of all pods there are, in whatever phase."""
    return sum(
        int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        for (kind, _), live in world.objects.items()
        if kind == "Pod"
        for container in live["spec"]["containers"]
    )


def limited(world: World) -> set[str]:
    """The services whose status says that the budget limits them."""
    found = {name: condition(world.fis(name), "ScalingLimited") for name in SERVICES}
    return {
        name
        for name, told in found.items()
        if (told.get("status"), told.get("reason")) == ("True", "GPUBudget")
    }


async def pods_created(world: World) -> int:
    """How many pods Kubernetes' own events tell of, those included that are gone."""
    found = await world.client.request(
        "GET", EVENT.path(world.namespace), params={"fieldSelector": "reason=SuccessfulCreate"}
    )
    replica_sets = [e for e in found["items"] if e["involvedObject"]["kind"] == REPLICA_SET.kind]
    return sum(event.get("count") or 1 for event in replica_sets)


async def test_pins_autoscalers_and_minimums_never_create_above_the_budget(world: World) -> None:
    """No spec names a GPU. 10 are asked for, 4 allowed; a freed one goes to who still waits."""
    most = 0

    def counted() -> int:
        nonlocal most
        most = max(most, gpus(world))
        return most

    operator = world.operator(
        env={"FLEETKEEPER_MAX_ACCELERATORS": str(BUDGET)},
        waits={"reconcile.writes.BUDGET_REQUEUE_S": 2.0},
    )
    plain = {"cpu": "100m", "memory": "128Mi"}
    for name, spec in SERVICES.items():
        await world.create(service(name, resources=plain, **spec))
    await operator.start().leads()
    await world.until("4 GPUs in use", lambda: counted() >= BUDGET and len(limited(world)) >= 2)
    await world.quiet()
    assert (counted(), gpus(world)) == (BUDGET, BUDGET)
    told = condition(world.fis(min(limited(world))), "ScalingLimited")["message"]
    assert "fleet's budget of 4 GPUs" in told

    await operator.stop()
    mark = world.mark()
    await operator.start().leads()
    await world.quiet()
    assert world.writes(mark) == []
    assert counted() == await pods_created(world) == BUDGET

    rich = max(SERVICES, key=lambda name: (world.get("Deployment", name) or {})["spec"]["replicas"])
    others = [name for name in SERVICES if name != rich]
    before = {name: (world.get("Deployment", name) or {})["spec"]["replicas"] for name in others}
    await world.delete(INFERENCE_SERVICE, rich)

    def freed() -> bool:
        counted()
        return any(
            (world.get("Deployment", name) or {})["spec"]["replicas"] > before[name]
            for name in others
        )

    await world.until("a waiting service gets what is free", freed)
    await world.quiet()
    assert counted() == BUDGET
