"""Fake nodes with GPUs: kwok acts as their kubelet, so thousands of pods need no machine."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fleetkeeper_local.control_plane import flags, probes
from fleetkeeper_local.control_plane.access import Access
from fleetkeeper_local.control_plane.programs import build_programs

ANNOTATION = "kwok.x-k8s.io/node"
GPU = "nvidia.com/gpu"
KWOK_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0

_RBAC: list[dict[str, object]] = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "kwok"},
        "rules": [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {
                "apiGroups": [""],
                "resources": ["nodes/status", "pods/status"],
                "verbs": ["patch", "update"],
            },
            {
                "apiGroups": [""],
                "resources": ["pods"],
                "verbs": ["delete", "get", "list", "patch", "update", "watch"],
            },
            {
                "apiGroups": ["", "events.k8s.io"],
                "resources": ["events"],
                "verbs": ["create", "patch", "update"],
            },
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "verbs": ["create", "get", "list", "patch", "update", "watch"],
            },
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "kwok"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "kwok",
        },
        "subjects": [{"kind": "User", "name": "system:kwok"}],
    },
]


class FakeNodes:
    """The fake nodes of one control plane."""

    def __init__(self, plane: Access, *, taint: bool = False) -> None:
        """Describe the nodes; kwok starts with the first one.

        Args:
            plane: where the nodes are registered.
            taint: whether to keep off all pods that do not tolerate `kwok.x-k8s.io/node=fake`
                (used next to a real node).
        """
        self._plane = plane
        self._taint = taint

    def add(self, count: int, gpus: int, labels: Mapping[str, str]) -> list[str]:
        """Create `count` nodes and return their names once all are Ready."""
        self.ensure_kwok()
        first = len(self.names())
        names = [f"gpu-{first + index:04d}" for index in range(count)]
        nodes = [self._node(name, gpus, labels) for name in names]
        self._plane.kubectl("create", "--validate=false", "-f", "-", input=_as_list(nodes))
        self._plane.processes.await_ready(
            "kwok", lambda: set(names) <= self._ready_names(), READY_TIMEOUT_S
        )
        return names

    def _ready_names(self) -> set[str]:
        nodes = self._plane.get("/api/v1/nodes?labelSelector=type%3Dkwok")
        return {
            node["metadata"]["name"]
            for node in (nodes or {}).get("items", ())
            for condition in node["status"].get("conditions", ())
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    def names(self) -> list[str]:
        """Return the names of the existing fake nodes."""
        nodes = self._plane.get("/api/v1/nodes?labelSelector=type%3Dkwok") or {}
        return [node["metadata"]["name"] for node in nodes.get("items", ())]

    def ensure_kwok(self) -> None:
        """Start kwok unless it runs."""
        build_programs(["kwok"])
        plane = self._plane
        argv = flags.kwok(plane.directory, plane.endpoint, f"{ANNOTATION}=fake")
        if plane.processes.running("kwok") is None:
            plane.kubectl("apply", "-f", "-", input=_as_list(_RBAC))
        # A directory of its own: kwok would read ~/.kwok otherwise.
        plane.processes.start("kwok", argv, env={"KWOK_WORKDIR": str(plane.directory / "kwok")})
        plane.processes.await_ready(
            "kwok",
            lambda: probes.answers_ok(f"http://127.0.0.1:{plane.endpoint.kwok}/healthz"),
            KWOK_TIMEOUT_S,
        )

    def _node(self, name: str, gpus: int, labels: Mapping[str, str]) -> dict[str, object]:
        resources = {"cpu": "128", "memory": "2Ti", "pods": "250", "ephemeral-storage": "4Ti"}
        if gpus:
            resources[GPU] = str(gpus)
        taints = [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}]
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {ANNOTATION: "fake"},
                "labels": {
                    "type": "kwok",
                    "kubernetes.io/hostname": name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                    **labels,
                },
            },
            "spec": {"taints": taints} if self._taint else {},
            "status": {"capacity": resources, "allocatable": resources},
        }


def _as_list(items: list[dict[str, object]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
