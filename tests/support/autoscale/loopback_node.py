"""A fake node whose pods get addresses in 127.0.0.0/8: their ports are sockets of the test."""

from __future__ import annotations

import json
from typing import Any, Final

from fleetkeeper_local.control_plane.control_plane import ControlPlane

LABEL: Final = "fleetkeeper.test/network"


def loopback_node(name: str, cidr: str, *, network: str, gpus: int) -> dict[str, Any]:
    """Return a node whose pods get addresses of this range, with a label for its network."""
    resources = {"cpu": "128", "memory": "2Ti", "pods": "30", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {LABEL: network, "kubernetes.io/hostname": name},
        },
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def prove_loopback(plane: ControlPlane, namespace: str, node: str, prefix: str) -> None:
    """Assert that a pod of the node has a loopback address, so that none is reached elsewhere."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "nodeSelector": {LABEL: node},
            "containers": [{"name": "probe", "image": "example.invalid/probe:1"}],
        },
    }
    plane.kubectl("create", "-f", "-", input=json.dumps(pod))
    space = ("-n", namespace)
    plane.kubectl(*space, "wait", "--for=condition=Ready", "pod/probe", "--timeout=300s")
    address = plane.kubectl(*space, "get", "pod", "probe", "-o", "jsonpath={.status.podIP}")
    assert address.startswith(prefix), address
    plane.kubectl(*space, "delete", "pod", "probe", "--wait=false")
