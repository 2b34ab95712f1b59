"""A namespace for the operator: the CRD, fake GPU nodes, and the rights that the chart gives."""

from __future__ import annotations

import json
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

from fleetkeeper.api.names import CRD_NAME
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.helm_chart import only, rendered
from tests.support.guards import GUARD_S

CRDS = Path(__file__).parents[3] / "crds"
NODES = 8
"""Fake nodes with 8 GPUs each."""
RBAC = "rbac.authorization.k8s.io/v1"
_applied_crds: dict[str, str] = {}
"""UID and generation of the CRD by control plane, as `prepare_namespace` left it."""


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
    """Create a namespace for the operator, and what the cluster lacks for it."""
    _ensure_crd(plane)
    nodes = (plane.get("/api/v1/nodes?labelSelector=type%3Dkwok") or {}).get("items") or []
    if len(nodes) < NODES:
        plane.add_nodes(NODES - len(nodes), gpus=8)
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    for name, rules in (
        ("fleetkeeper-test-operator", operator_rules()),
        ("fleetkeeper-router", [pods]),
    ):
        _apply(plane, RBAC, "clusterroles", {"kind": "ClusterRole", "rules": rules}, name)
    grant_rights(plane, namespace, f"operator-{namespace}")


def grant_rights(plane: ControlPlane, namespace: str, user: str) -> None:
    """Create the namespace and give the operator's user its rights there."""
    _apply(plane, "v1", "namespaces", {"kind": "Namespace"}, namespace)
    group = RBAC.partition("/")[0]
    binding = {
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "fleetkeeper-test-operator"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
    _apply(plane, RBAC, f"namespaces/{namespace}/rolebindings", binding, "test-operator")


def _ensure_crd(plane: ControlPlane) -> None:
    """Apply the CRD unless it is as the last call left it: the API server works a second for each."""
    if _crd_state(plane) != _applied_crds.get(plane.apiserver_url, ""):
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
        _applied_crds[plane.apiserver_url] = _crd_state(plane)


def _crd_state(plane: ControlPlane) -> str:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
    meta = (plane.get(path) or {}).get("metadata", {})
    return f"{meta.get('uid')} {meta.get('generation')}"


def _apply(
    plane: ControlPlane, version: str, collection: str, manifest: dict[str, Any], name: str
) -> None:
    """Send a server-side apply as the administrator; a process of kubectl costs ten times as much."""
    root = "api" if version == "v1" else "apis"
    request = urllib.request.Request(
        f"{plane.apiserver_url}/{root}/{version}/{collection}/{name}?fieldManager=test&force=true",
        data=json.dumps({"apiVersion": version, "metadata": {"name": name}, **manifest}).encode(),
        headers={"Content-Type": "application/apply-patch+yaml"},
        method="PATCH",
    )
    urllib.request.urlopen(request, timeout=GUARD_S, context=plane.context()).close()
