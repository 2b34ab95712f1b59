"""A podTemplate of an engine profile on a real API server: pods carry it, and a settled service is not written."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
import yaml

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, operator_world, service
from tests.support.reconcile.pod_templates import LOGS_IMAGE, PROFILE, RDMA_AND_LOGS

RDMA = "rdma/hca_shared_devices_a"


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    """A namespace, and a fake node that has RDMA devices."""
    async with operator_world(control_plane, "pod-template") as found:
        plane = found.plane
        node = json.loads(plane.kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))["items"][
            0
        ]["metadata"]["name"]
        devices = {"capacity": {RDMA: "8"}, "allocatable": {RDMA: "8"}}
        plane.kubectl("label", "node", node, "example.com/rdma=true")
        _patch_status(plane, node, devices)
        try:
            yield found
        finally:
            plane.kubectl("label", "node", node, "example.com/rdma-")
            none = {"capacity": {RDMA: None}, "allocatable": {RDMA: None}}
            _patch_status(plane, node, none)


def _patch_status(plane: ControlPlane, node: str, status: dict[str, Any]) -> None:
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={patch}")


async def test_pods_carry_the_template_and_a_settled_service_is_not_written(world: World) -> None:
    """With devices, a sidecar and volumes. Two RDMA devices of a replica are no two GPUs of the budget."""
    template = copy.deepcopy(RDMA_AND_LOGS)
    for amounts in template["spec"]["containers"][0]["resources"].values():
        amounts[RDMA] = 2
    profiles = world.directory / "profiles.yaml"
    profile = {**PROFILE, "podTemplate": template}
    profiles.write_text(yaml.safe_dump({"profiles": [profile], "aliases": {}}))
    operator = world.operator(
        env={"FLEETKEEPER_PROFILES_FILE": str(profiles), "FLEETKEEPER_MAX_ACCELERATORS": "2"}
    )
    await operator.start().leads()
    await world.create(service(engine={"profile": PROFILE["name"]}, replicas=2))
    await world.ready()
    deployment = world.get("Deployment", "chat") or {}
    pods = [item for (kind, _), item in world.objects.items() if kind == "Pod"]
    assert len(pods) == 2
    for pod in [deployment["spec"]["template"], *pods]:
        engine, logs = pod["spec"]["containers"]
        assert logs["image"] == LOGS_IMAGE
        assert engine["resources"]["limits"][RDMA] == "2"
        assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert "vllm-logs" in [volume["name"] for volume in pod["spec"]["volumes"]]
        assert "/var/log/vllm" in [mount["mountPath"] for mount in engine["volumeMounts"]]
        assert pod["metadata"]["labels"]["team"] == "platform"
    await world.quiet()
    mark = world.mark()
    await world.change(paused=True)
    await world.change(paused=False)
    await world.quiet()
    assert {write.resource for write in world.writes(mark)} <= {"inferenceservices/status"}
