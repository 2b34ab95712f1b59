"""Dynamic Resource Allocation: the real scheduler gives devices to the claims of engine pods."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, condition, operator_world, service
from tests.support.operators.reason_checks import apply, not_ready

DEVICES = 2


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    """A namespace with templates for claims, and a fake node with two devices of its own class."""
    async with operator_world(control_plane, "operator-claims") as found:
        name = found.namespace
        node = json.loads(found.plane.kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))[
            "items"
        ][0]["metadata"]["name"]
        driver = f"{name}.example.com"
        of_driver = [{"cel": {"expression": f"device.driver == '{driver}'"}}]
        devices = {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{number}"} for number in range(DEVICES)],
        }
        apply(
            found.plane,
            _manifest("DeviceClass", name, {"selectors": of_driver}),
            _manifest("ResourceSlice", name, devices),
            _template(name, "one-gpu", 1),
            _template(name, "three-gpus", 3),
        )
        try:
            yield found
        finally:
            found.plane.kubectl("delete", "resourceslice,deviceclass", name)


def _manifest(kind: str, name: str, spec: dict[str, Any], **meta: str) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name, **meta},
        "spec": spec,
    }


def _template(namespace: str, name: str, count: int) -> dict[str, Any]:
    exactly = {"deviceClassName": namespace, "count": count}
    claim = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    return _manifest("ResourceClaimTemplate", name, {"spec": claim}, namespace=namespace)


def _service(name: str, claim: dict[str, str], **spec: Any) -> dict[str, Any]:
    resources = {"cpu": "100m", "memory": "128Mi", "claims": [{"name": "gpu", **claim}]}
    return service(name, resources=resources, **spec)


def _claimed_devices(world: World) -> list[str]:
    """The devices that the scheduler gave to claims of this namespace."""
    found = json.loads(
        world.plane.kubectl("-n", world.namespace, "get", "resourceclaims", "-o", "json")
    )["items"]
    return sorted(
        result["device"]
        for claim in found
        for result in claim["status"].get("allocation", {}).get("devices", {}).get("results", ())
    )


async def test_each_replica_gets_its_own_device_within_the_gpu_budget(world: World) -> None:
    """Three replicas are asked for; the budget counts the two devices that claims hold."""
    operator = world.operator(
        env={"FLEETKEEPER_MAX_ACCELERATORS": str(DEVICES)},
        waits={"reconcile.writes.BUDGET_REQUEUE_S": 2.0},
    )
    await operator.start().leads()
    own = {"resourceClaimTemplateName": "one-gpu", "request": "gpu"}
    await world.create(_service("chat", own, replicas=3))
    await world.until(
        "limited by the budget",
        lambda: condition(world.fis(), "ScalingLimited").get("reason") == "GPUBudget",
    )
    await world.until("devices given", lambda: len(_claimed_devices(world)) == DEVICES)
    await world.quiet()
    assert _claimed_devices(world) == ["gpu-0", "gpu-1"]
    live = world.get("Deployment", "chat") or {}
    assert live["spec"]["replicas"] == DEVICES
    assert (world.fis() or {})["status"]["effective"]["accelerators"] == 1
    pods = [item for (kind, _), item in world.objects.items() if kind == "Pod"]
    assert all("nvidia.com/gpu" not in json.dumps(pod["spec"]) for pod in pods)
    mark = world.mark()
    await world.change(podMetadata={"labels": {}})
    await world.quiet()
    assert {write.resource for write in world.writes(mark)} <= {"inferenceservices/status"}


async def test_claims_without_devices_and_claims_that_are_missing_say_so(world: World) -> None:
    await world.operator().start().leads()
    await world.create(_service("too-many", {"resourceClaimTemplateName": "three-gpus"}))
    await world.create(_service("no-template", {"resourceClaimTemplateName": "no-such"}))
    await world.create(_service("no-claim", {"resourceClaimName": "no-such"}))
    await not_ready(world, "too-many", "Unschedulable", "cannot allocate all claims")
    for name in ("no-template", "no-claim"):
        await not_ready(world, name, "Unschedulable", "spec.resources.claims")
    apply(world.plane, _template(world.namespace, "no-such", 1))
    await world.ready("no-template")
