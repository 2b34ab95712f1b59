"""Fleetkeeper installed on a cluster by Helm, and a model for its engines to serve."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.common.shell import run
from fleetkeeper_local.demo.cluster import CHART, Cluster, CommandError, Live
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.scenario import EngineKind
from fleetkeeper_local.images import builder
from fleetkeeper_local.node.node import Node

RELEASE = "fleetkeeper"
NAMESPACE = "fleetkeeper-system"
GATEWAY = "fleetkeeper-gateway"
"""Its Deployment and its Service."""
BATCH = f"{GATEWAY}-batch"
PROFILE = "cpu-0.32.0-1"
SIMULATED_PROFILE = "simulated-0.32.0-1"
ENGINE_IMAGES = {EngineKind.VLLM: "engine", EngineKind.SIMULATED: "simulated"}
MODEL_CLAIM = "models"
TINY = REPOSITORY / "examples" / "tiny.yaml"
OPERATOR_SELECTOR = "app.kubernetes.io/name=fleetkeeper,app.kubernetes.io/component=operator"
INSTALL_TIMEOUT = "10m"


@dataclass(frozen=True)
class ImageNames:
    """The names under which the cluster pulls the product's images."""

    operator: str
    engine: str
    """Empty: services cannot use vLLM on CPU."""
    router: str
    gateway: str = ""
    """Empty: the chart is installed without a gateway."""
    redis: str = ""
    """Empty: each replica of the gateway has limits of its own, and there are no batches."""
    simulated: str = ""
    """Empty: services cannot use simulated engines."""


@dataclass
class Installation:
    """A Helm release of the chart."""

    cluster: Cluster
    values: dict[str, Any] = field(default_factory=dict)
    release: str = RELEASE
    namespace: str = NAMESPACE
    chart: Path = CHART

    def install(self, values: Mapping[str, Any] | None = None) -> None:
        """Install or upgrade, and return when the operator is ready.

        Raises:
            CommandError: Helm failed; the text has its output and the state of the operator's pods.
        """
        if values is not None:
            self.values = dict(values)
        self._end_interrupted()
        try:
            self.cluster.helm(
                *("upgrade", "--install", self.release, str(self.chart), "--create-namespace"),
                *("--namespace", self.namespace, "--wait", "--timeout", INSTALL_TIMEOUT),
                values=self.values,
            )
        except CommandError as error:
            raise CommandError(f"{error}\n{self.describe()}") from error

    def _end_interrupted(self) -> None:
        """Revert what an interrupted Helm left half done; it blocks every further command."""
        try:
            said = self.cluster.helm(
                "status", self.release, "--namespace", self.namespace, "-o=json"
            )
        except CommandError:
            return  # no release yet
        state = json.loads(said)["info"]["status"]
        if state == "pending-install":
            self.uninstall()
        elif state.startswith("pending"):
            self.cluster.helm("rollback", self.release, "--namespace", self.namespace)

    def uninstall(self) -> None:
        """Remove the release; the CRD stays, as the chart specifies."""
        self.cluster.helm(
            *("uninstall", self.release, "--namespace", self.namespace, "--wait"),
            *("--ignore-not-found",),
        )

    def operators(self) -> list[Live]:
        """Return the operator's pods, oldest first."""
        return self.cluster.pods(self.namespace, OPERATOR_SELECTOR)

    def leader(self) -> Live:
        """Return the pod that holds the Lease.

        Raises:
            LocalError: no pod holds it.
        """
        lease = json.loads(
            self.cluster.kubectl("-n", self.namespace, "get", "lease", self.release, "-o", "json")
        )
        holder = (lease["spec"].get("holderIdentity") or "").strip()
        for pod in self.operators():
            if pod["metadata"]["uid"] in holder:
                return pod
        raise LocalError(f"no operator pod is the leader; the Lease names {holder or 'no holder'}")

    def logs(self) -> str:
        """Return the logs of the operator's containers, including terminated ones."""
        said = []
        for pod in self.operators():
            name = pod["metadata"]["name"]
            for previous in ((), ("--previous",)):
                try:
                    said.append(self.cluster.kubectl("-n", self.namespace, "logs", name, *previous))
                except CommandError:
                    continue  # it never ran, or never ended before
        return "\n".join(said)

    def describe(self) -> str:
        """Return the state of the operator's pods and their newest events, for error texts."""
        try:
            pods = self.cluster.kubectl("-n", self.namespace, "get", "pods", "-o", "wide")
            events = self.cluster.kubectl(
                "-n", self.namespace, "get", "events", "--sort-by=.lastTimestamp"
            )
        except CommandError as error:
            return str(error)
        return f"{pods}\n" + "\n".join(events.splitlines()[-12:])


def push_images(node: Node, engines: Collection[EngineKind] = tuple(EngineKind)) -> ImageNames:
    """Build the images (unchanged ones come from the cache) and push them to the node.

    `engines`: those that services may use; images of others are not built.
    """
    port = node.settings.registry_port
    unused = {image for kind, image in ENGINE_IMAGES.items() if kind not in engines}
    names = (found.name for found in fields(ImageNames))
    return ImageNames(
        **{name: "" if name in unused else builder.build(name).push(port) for name in names}
    )


def product_values(names: ImageNames) -> dict[str, Any]:
    """Return the chart's values for images of this checkout, with small requests."""
    repository, _, tag = names.operator.rpartition(":")
    values: dict[str, Any] = {
        "image": {"repository": repository, "tag": tag},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "router": {"image": names.router, "cpu": "50m", "memory": "256Mi"},
        "engineProfiles": {},
    }
    if names.engine:
        values["engineProfiles"][PROFILE] = {"image": names.engine}
    if names.simulated:
        values["simulatedEngines"] = True
        values["engineProfiles"][SIMULATED_PROFILE] = {"image": names.simulated}
    return {**values, "gateway": _gateway_values(names)} if names.gateway else values


def _gateway_values(names: ImageNames) -> dict[str, Any]:
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}}
    return {
        "enabled": True,
        "image": names.gateway,
        "resources": small,
        # The local node creates no volumes.
        "usage": {"resources": small, "persistence": {"enabled": False}},
        "redis": {"enabled": bool(names.redis), "image": names.redis, "resources": small},
        "batch": {
            "enabled": bool(names.redis),
            "resources": small,
            "store": {"persistence": {"enabled": False}},
        },
    }


def desired_values(names: ImageNames, node: Node) -> dict[str, Any]:
    """Return the chart's values for the local node: its images, its Prometheus, small requests."""
    prometheus = {
        "url": node.prometheus_url,
        "peers": [{"cidr": f"{node.settings.node_ip}/32"}],
    }
    return {**product_values(names), "prometheus": prometheus}


def put_model(cluster: Cluster, node: Node, namespace: str) -> None:
    """Write the tiny model and mount it into a namespace as the read-only claim `models`."""
    folder = node.directory / "models"
    if not (folder / "tiny" / "config.json").exists():
        python = REPOSITORY / ".venv-engine" / "bin" / "python"
        run(python, REPOSITORY / "scripts" / "tiny_model.py", folder / "tiny")
    folder.chmod(0o755)
    (folder / "tiny").chmod(0o755)
    cluster.apply(*desired_model_claim(folder, node.settings.node_name, namespace))


def desired_model_claim(folder: Path, node_name: str, namespace: str) -> list[Live]:
    """Return a node's directory as a volume, bound to the claim `models` of a namespace."""
    return desired_claim(MODEL_CLAIM, folder, node_name, namespace, "ReadOnlyMany")


def desired_claim(
    name: str, folder: Path, node_name: str, namespace: str, access_mode: str
) -> list[Live]:
    """Return a node's directory as a volume, bound to a claim of a namespace."""
    common = {
        "accessModes": [access_mode],
        "storageClassName": "",
        "volumeMode": "Filesystem",
    }
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node_name]}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"fleetkeeper-{name}-{namespace}"},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"name": name, "namespace": namespace},
                "local": {"path": str(folder)},
                "nodeAffinity": {
                    "required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {**common, "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]


def ensure_namespace(cluster: Cluster, namespace: str) -> None:
    """Create a namespace that admits only hardened pods, as Fleetkeeper's are."""
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": namespace,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        }
    )


def apply_example(cluster: Cluster, namespace: str, file: Path = TINY, name: str = "tiny") -> Fleet:
    """Apply an example in a namespace."""
    cluster.kubectl("-n", namespace, "apply", "-f", str(file))
    return Fleet(cluster, namespace, name)
