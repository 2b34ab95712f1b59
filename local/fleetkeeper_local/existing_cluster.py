"""An existing cluster of the user: inspected, recorded, never changed by `fleetkeeper local`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from fleetkeeper_local.common.errors import LocalError

if TYPE_CHECKING:
    import kubernetes

MINIMUM: Final = (1, 31)
"""The chart's `kubeVersion`."""
TIMEOUT_S: Final = 10.0
_RECORD: Final = "given.json"
_GPU: Final = ("nvidia.com/gpu", "amd.com/gpu")
_NEEDED: Final = (
    ("", "namespaces"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("rbac.authorization.k8s.io", "clusterroles"),
)
"""Cluster-scoped objects that installing the chart creates: API group and resource."""


@dataclass(frozen=True)
class GivenCluster:
    """Facts about the inspected cluster."""

    kubeconfig: Path
    server: str
    version: str
    nodes: int
    gpus: int
    """Allocatable GPUs of the Ready nodes."""
    lacks: tuple[str, ...]
    """Permissions that the installation needs and this user lacks."""


def observe_cluster(kubeconfig: Path) -> GivenCluster:
    """Inspect a cluster with a few reads; nothing in it is changed.

    Raises:
        LocalError: the file cannot be read, the API does not respond or denies access, the version
            is older than the chart allows, or no node is Ready.
    """
    # Imported here: commands that need no cluster should not wait for its client.
    import kubernetes  # noqa: PLC0415
    import urllib3  # noqa: PLC0415
    from kubernetes.client.exceptions import ApiException  # noqa: PLC0415

    client = _client(kubeconfig)
    server = client.configuration.host
    try:
        found = kubernetes.client.VersionApi(client).get_code(_request_timeout=TIMEOUT_S)
        _require_version(server, found.git_version, (found.major, found.minor))
        nodes = kubernetes.client.CoreV1Api(client).list_node(_request_timeout=TIMEOUT_S).items
        lacks = tuple(_lacking(kubernetes.client.AuthorizationV1Api(client)))
    except ApiException as error:
        raise LocalError(
            f"{server} responded {error.status} {error.reason}; the user of {kubeconfig} needs to read "
            "nodes; log in again or use another kubeconfig"
        ) from error
    except urllib3.exceptions.HTTPError as error:
        raise LocalError(
            f"{server} (of {kubeconfig}) does not answer: {_cause(error)}; is the cluster up?"
        ) from error
    ready = [node for node in nodes if _is_ready(node)]
    if not ready:
        raise LocalError(
            f"{server} has no Ready node ({len(nodes)} in all); no pod could run there"
        )
    return GivenCluster(
        kubeconfig=kubeconfig,
        server=server,
        version=found.git_version,
        nodes=len(ready),
        gpus=sum(_gpus(node.status.allocatable or {}) for node in ready),
        lacks=lacks,
    )


def remember(directory: Path, cluster: GivenCluster) -> None:
    """Record in the data directory which cluster `status`, `kubeconfig` and `down` refer to."""
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{_RECORD}"
    draft.write_text(json.dumps({"kubeconfig": str(cluster.kubeconfig)}) + "\n")
    draft.replace(directory / _RECORD)


def remembered(directory: Path) -> Path | None:
    """Return the kubeconfig of the recorded cluster, or None if the directory records none.

    Raises:
        LocalError: the record is not readable.
    """
    path = directory / _RECORD
    if not path.exists():
        return None
    try:
        return Path(json.loads(path.read_text())["kubeconfig"])
    except (ValueError, KeyError, TypeError) as error:
        raise LocalError(
            f"{path} is not readable ({error}); remove it and run `up` again"
        ) from error


def forget(directory: Path) -> None:
    """Remove the record; the cluster is left unchanged."""
    (directory / _RECORD).unlink(missing_ok=True)


def lines_of(cluster: GivenCluster) -> list[str]:
    """Return a summary of the cluster for people, one fact per line."""
    return [
        f"API         {cluster.server} (Kubernetes {cluster.version})",
        f"nodes       {cluster.nodes} Ready, {cluster.gpus} GPUs allocatable",
        *(f"missing     {lack}" for lack in cluster.lacks),
        f"kubeconfig  {cluster.kubeconfig}",
    ]


def _client(kubeconfig: Path) -> kubernetes.client.ApiClient:
    import kubernetes  # noqa: PLC0415 - as above

    try:
        client = kubernetes.config.new_client_from_config(str(kubeconfig))
    except (kubernetes.config.ConfigException, OSError, yaml.YAMLError, TypeError) as error:
        raise LocalError(
            f"{kubeconfig} is not a usable kubeconfig: {_cause(error)}; "
            "pass a file that `kubectl --kubeconfig` accepts"
        ) from error
    client.configuration.retries = False
    return client


def _require_version(server: str, shown: str, version: tuple[str, str]) -> None:
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in version)
    if (major, minor) < MINIMUM:
        raise LocalError(
            f"{server} runs Kubernetes {shown}; Fleetkeeper needs {MINIMUM[0]}.{MINIMUM[1]} or later"
        )


def _lacking(api: kubernetes.client.AuthorizationV1Api) -> Iterable[str]:
    for group, resource in _NEEDED:
        attributes = {"verb": "create", "group": group, "resource": resource}
        review = {"spec": {"resourceAttributes": attributes}}
        answer = api.create_self_subject_access_review(review, _request_timeout=TIMEOUT_S)
        if not answer.status.allowed:
            yield f"permission to create {resource}: this user cannot install the chart"


def _is_ready(node: kubernetes.client.V1Node) -> bool:
    return any(
        condition.type == "Ready" and condition.status == "True"
        for condition in node.status.conditions or ()
    )


def _gpus(allocatable: dict[str, str]) -> int:
    return sum(int(Decimal(allocatable.get(name, "0"))) for name in _GPU)


def _cause(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
