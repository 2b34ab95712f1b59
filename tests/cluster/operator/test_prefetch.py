"""A new model is downloaded by a Job before replicas are replaced, on a real API server.

kube-controller-manager runs the Job. kwok ends its pod at once, unless no node fits the pod: then the
test says how the pod ends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, POD
from fleetkeeper.reconcile.manifests.engine_document import model_of
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, condition, operator_world, service

OLD, NEW = "a" * 40, "b" * 40
JOB = "chat-fk-prefetch"
NOWHERE = {"nodeSelector": {"no": "such-node"}}
LINE = '{"class": "ModelNotFound", "code": 66, "phase": "start", "message": "no such revision", "detail": ""}'


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-prefetch") as found:
        _claim(found)
        yield found
        control_plane.kubectl("delete", "persistentvolume", found.namespace, "--wait=false")


def _claim(world: World) -> None:
    """Create the claim `hub-cache`, bound to a volume that no pod of these nodes mounts."""
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": world.namespace},
        "spec": {
            **common,
            "capacity": size,
            "hostPath": {"path": "/none"},
            "claimRef": {"namespace": world.namespace, "name": "hub-cache"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "hub-cache", "namespace": world.namespace},
        "spec": {**common, "volumeName": world.namespace, "resources": {"requests": size}},
    }
    for manifest in (volume, claim):
        world.plane.kubectl("create", "-f", "-", input=json.dumps(manifest))


def model(revision: str) -> dict[str, Any]:
    """A model of the hub with a shared cache."""
    return {
        "source": "hf://example/tiny",
        "revision": revision,
        "cache": {"claimName": "hub-cache"},
    }


def live_model(world: World) -> str:
    """The model of the live template."""
    live = world.get("Deployment", "chat") or {}
    return model_of(live["spec"]["template"]["spec"])


def job_pods(world: World) -> dict[str, str]:
    """The phases of the Job's pods by name."""
    return {
        name: live.get("status", {}).get("phase", "")
        for (kind, name), live in world.objects.items()
        if kind == "Pod"
        and live["metadata"]["labels"].get("fleetkeeper.io/component") == "prefetch"
    }


def job_pod(world: World) -> str:
    """The name of the Job's pod that has not ended, "" if there is none."""
    return next((name for name, phase in job_pods(world).items() if phase == "Pending"), "")


async def end_pod(world: World, phase: str, exit_code: int, message: str = "") -> None:
    """End the Job's pod as a kubelet would."""
    await world.until("the Job has a pod", lambda: job_pod(world))
    terminated = {
        "exitCode": exit_code,
        "message": message,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:00Z",
    }
    ended = {
        "name": "engine",
        "image": "engine",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": terminated},
    }
    status = {"phase": phase, "containerStatuses": [ended]}
    await world.client.request(
        "PATCH",
        POD.path(world.namespace, job_pod(world), "status"),
        body={"status": status},
        content_type="application/merge-patch+json",
    )


async def until_pods(world: World, number: int) -> None:
    """Wait until the Jobs have this number of pods."""
    await world.until(f"{number} pods", lambda: len(job_pods(world)) == number, GUARD_S)


async def until_reason(world: World, kind: str, reason: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition has this reason."""
    await world.until(
        f"{kind} {reason}", lambda: condition(world.fis(), kind).get("reason") == reason, timeout_s
    )


async def test_a_new_model_is_downloaded_and_then_rolled_out(world: World) -> None:
    """The Job's end is the controller manager's; at rest nothing is written, nor by a new process."""
    operator = await world.operator().start().leads()
    await world.create(service(replicas=1, model=model(OLD)))
    await world.ready()
    await world.quiet()
    assert not [item for item in world.writes() if item.resource == "jobs"]

    mark = world.mark()
    await world.change(model=model(NEW))
    # The old replicas serve, and the service is ready, while the Job runs.
    await world.until("rolled out", lambda: live_model(world) == f"example/tiny@{NEW}")
    await world.ready()
    await world.until("the Job is gone", lambda: world.get("Job", JOB) is None)
    await world.until("its pod is gone", lambda: not job_pods(world))
    await world.until("its policy is gone", lambda: world.get("NetworkPolicy", JOB) is None)
    await world.quiet()
    order = [item.resource for item in world.writes(mark) if item.code < 300]
    assert order.index("networkpolicies") < order.index("jobs") < order.index("deployments")
    assert world.accepted_writes(mark)["jobs"] == 2
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}

    operator.kill()
    mark = world.mark()
    await operator.start().leads()
    await world.quiet()
    assert world.writes(mark, events=True) == []


async def test_the_template_waits_for_the_end_of_the_job(world: World) -> None:
    """Also if another process of the operator sees the end; a deleted Job is created again."""
    operator = await world.operator().start().leads()
    await world.create(service(replicas=1, model=model(OLD)))
    await world.ready()
    await world.change(model=model(NEW), placement=NOWHERE)
    await until_reason(world, "Progressing", "PrefetchingModel")
    await world.until("the Job has a pod", lambda: job_pod(world))
    await world.quiet()
    assert live_model(world) == f"example/tiny@{OLD}"
    first = (world.get("Job", JOB) or {})["metadata"]["uid"]
    await world.delete(CHILDREN[Kind.JOB], JOB)
    await world.until(
        "another Job",
        lambda: (world.get("Job", JOB) or {}).get("metadata", {}).get("uid") not in {None, first},
    )
    operator.kill()
    await operator.start().leads()
    await world.quiet()
    assert live_model(world) == f"example/tiny@{OLD}"
    await until_pods(world, 1)
    await end_pod(world, "Succeeded", 0)
    await world.until("rolled out", lambda: live_model(world) == f"example/tiny@{NEW}")
    await world.until("the Job is gone", lambda: world.get("Job", JOB) is None)


async def test_an_image_without_the_command_is_rolled_out_at_once(world: World) -> None:
    """Its exit code 2 ends the Job at the first attempt."""
    await world.operator().start().leads()
    await world.create(service(replicas=1, model=model(OLD)))
    await world.ready()
    await world.change(model=model(NEW), placement=NOWHERE)
    await end_pod(world, "Failed", 2)
    await world.until("rolled out", lambda: live_model(world) == f"example/tiny@{NEW}")
    await world.until("the Job is gone", lambda: world.get("Job", JOB) is None)


@pytest.mark.exhaustive
async def test_after_a_failure_the_old_replicas_serve(world: World) -> None:
    """Four attempts, then the reason of the last one; the next change starts another Job."""
    await world.operator().start().leads()
    await world.create(service(replicas=1, model=model(OLD)))
    await world.ready()
    await world.change(model=model(NEW), placement=NOWHERE)
    for number in range(1, 5):
        await until_pods(world, number)
        await end_pod(world, "Failed", 66, LINE)
    await until_reason(world, "Stalled", "PrefetchFailed", 120)
    await world.quiet(12.0)
    assert "ModelNotFound: no such revision" in condition(world.fis(), "Stalled")["message"]
    assert live_model(world) == f"example/tiny@{OLD}"
    assert condition(world.fis(), "Available")["status"] == "True"
    await world.change(model=model("c" * 40), placement={"nodeSelector": None})
    await world.ready()
    assert live_model(world) == f"example/tiny@{'c' * 40}"
