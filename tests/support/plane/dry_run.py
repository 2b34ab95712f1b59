"""What the API server says to a server-side apply of an account, without a process of kubectl for each."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import yaml

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, POD
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.probes import client_context
from tests.support.guards import GUARD_S


def refusal(plane: ControlPlane, kubeconfig: Path, manifest: dict[str, Any]) -> str:
    """Return why the API server refuses to apply a manifest, "" if it does not; nothing is kept.

    Args:
        plane: the control plane.
        kubeconfig: of a ServiceAccount.
        manifest: a child of a service, or a pod.
    """
    kind, meta = manifest["kind"], manifest["metadata"]
    resource = POD if kind == POD.kind else CHILDREN[Kind(kind)]
    path = resource.path(meta["namespace"], meta["name"])
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    request = urllib.request.Request(
        f"{plane.apiserver_url}{path}?dryRun=All&fieldManager=test&force=true",
        data=json.dumps(manifest).encode(),
        headers={
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/apply-patch+yaml",
        },
        method="PATCH",
    )
    context = client_context(plane.ca_file, None)
    try:
        urllib.request.urlopen(request, timeout=GUARD_S, context=context).close()
    except HTTPError as problem:
        with problem:
            return str(json.load(problem)["message"])
    return ""
