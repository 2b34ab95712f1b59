"""Others work on the same objects: nobody fights, and nothing is written that need not be."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, operator_world, service

SIDECAR = {
    "name": "mesh-proxy",
    "image": "mesh:1",
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
}


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-neighbours") as found:
        yield found


def replicas(world: World) -> int:
    """The replicas of the engine Deployment."""
    return int((world.get("Deployment", "chat") or {})["spec"]["replicas"])


async def test_an_autoscaler_on_the_scale_subresource_is_followed(world: World) -> None:
    """The HPA's controller reads /scale and raises it to its minimum; others move it further."""
    await world.operator(waits=None).start().leads()  # whose waits bound the number of statuses
    await world.create(service(replicas=1, scaling={"mode": "External"}))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat", "namespace": world.namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": INFERENCE_SERVICE.api_version,
                "kind": INFERENCE_SERVICE.kind,
                "name": "chat",
            },
            "minReplicas": 2,
            "maxReplicas": 3,
        },
    }
    world.plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(hpa))
    await world.until("the autoscaler's minimum", lambda: replicas(world) == 2, GUARD_S)
    await world.until("2 ready", lambda: (world.fis() or {})["status"].get("readyReplicas") == 2)
    await world.quiet(3.0)
    written = world.accepted_writes(mark)
    assert written.keys() == {"deployments", "inferenceservices/status"}
    assert written["deployments"] == 1
    assert written["inferenceservices/status"] <= 2, "ready, then available or gone"
    assert (world.fis() or {})["spec"]["replicas"] == 2

    world.plane.kubectl("-n", world.namespace, "delete", "hpa", "chat")
    mark = world.mark()
    world.plane.kubectl("-n", world.namespace, "scale", "fis", "chat", "--replicas=3")
    await world.until("3 ready", lambda: (world.fis() or {})["status"].get("readyReplicas") == 3)
    await world.quiet(3.0)
    written = world.accepted_writes(mark)
    assert written.keys() == {"deployments", "inferenceservices/status"}
    assert written["deployments"] == 1
    assert written["inferenceservices/status"] <= 2, "ready, then available or gone"
    scale = json.loads(
        world.plane.kubectl(
            *("-n", world.namespace, "get", "fis", "chat", "--subresource=scale", "-o", "json")
        )
    )
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 3


@pytest.mark.exhaustive
async def test_an_injected_sidecar_stays_and_costs_no_write_of_a_child(world: World) -> None:
    """Another manager's container in the template: Kubernetes rolls it out, nothing is reverted."""
    await world.operator(waits=None).start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    template = {"spec": {"containers": [SIDECAR]}}
    injected = {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": "chat"},
        "spec": {"template": template},
    }
    await world.patch_or_create(DEPLOYMENT, injected)
    await world.until(
        "a pod with a sidecar is ready",
        lambda: any(
            len(live["spec"]["containers"]) == 2
            and any(
                item["type"] == "Ready" and item["status"] == "True"
                for item in live.get("status", {}).get("conditions", ())
            )
            for (kind, _), live in world.objects.items()
            if kind == "Pod"
        ),
    )
    await world.ready()
    await world.quiet(11.0)  # counts are written at most every 10 s
    written = Counter(write.resource for write in world.writes(mark))
    assert set(written) <= {"inferenceservices/status"}, "only progress is reported"
    assert written["inferenceservices/status"] <= 3
    containers = (world.get("Deployment", "chat") or {})["spec"]["template"]["spec"]["containers"]
    assert {item["name"] for item in containers} == {"engine", "mesh-proxy"}
    mark = world.mark()
    await world.patch(INFERENCE_SERVICE, "chat", {"metadata": {"annotations": {"look": "again"}}})
    await world.quiet(3.0)
    assert world.writes(mark, events=True) == []


async def test_kubectl_annotate_and_label_cost_no_write(world: World) -> None:
    """On the service, on every child, on a pod."""
    await world.operator().start().leads()
    await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    pods = [key for key in world.objects if key[0] == "Pod"]
    objects = [f"{kind}/{name}" for kind, name in [*world.children(), *pods, ("fis", "chat")]]
    for verb in ("annotate", "label"):
        said = world.plane.kubectl("-n", world.namespace, verb, *objects, "example.com/by=me")
        assert len(said.splitlines()) == len(objects) > len(CHILDREN)
    await world.quiet(3.0)
    assert world.writes(mark, events=True) == []
