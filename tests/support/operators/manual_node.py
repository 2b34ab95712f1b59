"""A node without a kubelet and without kwok: the test writes the status of its pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.api.names import LABEL_SERVICE
from tests.support.operators.operator_world import Live, World
from tests.support.operators.reason_checks import apply

MANUAL = "test.fleetkeeper.io/kubelet"
"""Label of such a node."""


@contextmanager
def manual_node(world: World) -> Iterator[dict[str, str]]:
    """Add a node with room for many pods, and yield its labels as a node selector."""
    name = f"manual-{world.namespace}"
    labels = {MANUAL: name}
    apply(
        world.plane,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {**labels, "kubernetes.io/os": "linux"}},
        },
    )
    room = {"cpu": "64", "memory": "512Gi", "pods": "100", "nvidia.com/gpu": "64"}
    ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
    patch = {"status": {"capacity": room, "allocatable": room, "conditions": ready}}
    world.plane.kubectl(
        *("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
    )
    try:
        yield labels
    finally:
        world.plane.kubectl("delete", "node", name, "--wait=false")


async def bound_pod(world: World, service: str) -> Live:
    """Return the service's pod on a manual node, once there is one."""

    def found() -> Live | None:
        for (kind, _), live in world.objects.items():
            label = (live["metadata"].get("labels") or {}).get(LABEL_SERVICE)
            node = str(live["spec"].get("nodeName", "")) if kind == "Pod" else ""
            if label == service and node.startswith("manual-"):
                return live
        return None

    await world.until(f"{service} bound", found)
    pod = found()
    assert pod is not None
    return pod


async def report(world: World, service: str, state: Live, restarts: int = 0, **last: Live) -> None:
    """Write the status of the service's pod, as a kubelet does; `last` is its container's last state."""
    pod = await bound_pod(world, service)
    first = pod["spec"]["containers"][0]
    container = {
        "name": first["name"],
        "image": first["image"],
        "imageID": "",
        "ready": False,
        "restartCount": restarts,
        "state": state,
        "lastState": last,
    }
    await world.client.request(
        "PATCH",
        POD.path(world.namespace, pod["metadata"]["name"], "status"),
        body={"status": {"phase": "Running", "containerStatuses": [container]}},
        content_type="application/merge-patch+json",
    )


def end_pod(world: World, pod: Live) -> None:
    """Remove a pod that was deleted, as a kubelet does when its processes have ended."""
    name = pod["metadata"]["name"]
    where = ("-n", world.namespace, "delete", "pod", name)
    world.plane.kubectl(*where, "--grace-period=0", "--force", "--ignore-not-found")
