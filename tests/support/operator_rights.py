"""A namespace for the operator: the CRD, fake GPU nodes, and the rights that the chart gives."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.helm_chart import only, rendered

CRDS = Path(__file__).parents[2] / "crds"
NODES = 8
"""Fake nodes with 8 GPUs each."""


@lru_cache(maxsize=1)
def operator_rules() -> list[dict[str, Any]]:
    """Return the rights that the chart gives the operator; every test runs with them."""
    objects = rendered()
    roles = [
        only(objects, "ClusterRole", "fleetkeeper"),
        only(objects, "Role", "fleetkeeper-leader"),
    ]
    return [rule for role in roles for rule in role["rules"]]


def prepare_namespace(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    nodes = json.loads(plane.kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))["items"]
    if len(nodes) < NODES:
        plane.add_nodes(NODES - len(nodes), gpus=8)
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "fleetkeeper-test-operator"},
        "rules": operator_rules(),
    }
    router = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "fleetkeeper-router"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }
    for manifest in (role, router):
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))
    grant_rights(plane, namespace, f"operator-{namespace}")


def grant_rights(plane: ControlPlane, namespace: str, user: str) -> None:
    """Create the namespace and give the operator's user its rights there."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "test-operator", "namespace": namespace},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "fleetkeeper-test-operator",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    for manifest in (space, binding):
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))
