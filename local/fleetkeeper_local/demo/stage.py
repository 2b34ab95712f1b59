"""The cluster of the demo: the local node, or an existing cluster of the user."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo import inject
from fleetkeeper_local.demo.cluster import Cluster
from fleetkeeper_local.demo.fleet import Fleet, PodFacts
from fleetkeeper_local.demo.installation import (
    MODEL_CLAIM,
    Installation,
    desired_values,
    push_images,
    put_model,
)
from fleetkeeper_local.demo.scenario import EngineKind
from fleetkeeper_local.node.node import Node

FREEZE = """
import os, signal
from pathlib import Path
for folder in Path("/proc").iterdir():
    command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
    if command.startswith(b"VLLM::EngineCore") or b"fleetkeeper_engine.simulated" in command:
        os.kill(int(folder.name), signal.SIGSTOP)
"""
SEED = "import sys; sys.path.insert(0, '/script'); import tiny_model; from pathlib import Path; tiny_model.write(Path('/models/tiny'))"


@dataclass
class LocalStage:
    """The node of this machine, which the demo may break."""

    node: Node

    def __post_init__(self) -> None:
        """Start the node if it does not run."""
        self.node.up()
        self.cluster = Cluster(self.node.kubeconfig)

    def install(self, engines: EngineKind = EngineKind.VLLM) -> Installation:
        """Install images from this checkout, through the node's registry."""
        say("building and pushing the images (unchanged ones take a second)")
        values = desired_values(push_images(self.node, [engines]), self.node)
        return _install(self.cluster, values)

    def put_model(self, namespace: str) -> None:
        """Provide the model in a directory of this machine."""
        put_model(self.cluster, self.node, namespace)

    @contextmanager
    def reach(self, namespace: str, service: str) -> Iterator[str]:
        """Provide the address of a Service: this machine is the cluster's node."""
        yield f"http://{self.cluster.cluster_ip(namespace, service)}"

    def freeze_engine(self, fleet: Fleet, pod: PodFacts) -> None:
        """Send SIGSTOP to the engine's core, found by the pod's cgroup."""
        del fleet
        inject.freeze_engine(pod)

    def kill_operators(self, installation: Installation) -> int:
        """Send SIGKILL to the operators, found by the pods' cgroups."""
        return inject.kill_operators(installation)

    def stop_prometheus(self) -> bool:
        """Stop the node's Prometheus."""
        self.node.processes.stop(["prometheus"])
        return True

    def start_prometheus(self) -> None:
        """Start it with `local up`."""
        self.node.up()


@dataclass
class GivenStage:
    """An existing cluster: nothing outside the demo's own pods is touched.

    `values` is the chart's values file with images that the cluster has or can pull.
    """

    cluster: Cluster
    values: Path

    def install(self, engines: EngineKind = EngineKind.VLLM) -> Installation:
        """Install with the user's values, which have images for the engines."""
        del engines
        return _install(self.cluster, yaml.safe_load(self.values.read_text()) or {})

    def put_model(self, namespace: str) -> None:
        """Write the model with a job (engine's image) into a claim of the default class."""
        profiles = (yaml.safe_load(self.values.read_text()) or {}).get("engineProfiles") or {}
        images = [p["image"] for name, p in profiles.items() if name.startswith("cpu") and p]
        if not images:
            raise LocalError(f"{self.values} has no image for a cpu profile in engineProfiles")
        script = (REPOSITORY / "scripts" / "tiny_model.py").read_text()
        self.cluster.apply(*desired_seed(images[0], script), namespace=namespace)
        self.cluster.kubectl(
            *("-n", namespace, "wait", "--for=condition=Complete", "job/tiny-model"),
            "--timeout=600s",
            timeout_s=620,
        )

    @contextmanager
    def reach(self, namespace: str, service: str) -> Iterator[str]:
        """Provide the address of a port-forward; empty if the values install no such Service."""
        found = self.cluster.kubectl(
            *("-n", namespace, "get", "service", service, "--ignore-not-found", "-o", "name")
        )
        if not found.strip():
            yield ""
            return
        argv = self.cluster.argv("-n", namespace, "port-forward", f"service/{service}", ":80")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as forward:
            try:
                line = forward.stdout.readline() if forward.stdout else ""
                port = re.search(r"127\.0\.0\.1:(\d+)", line)
                if port is None:
                    raise LocalError(f"kubectl port-forward failed: {line.strip()}")
                yield f"http://127.0.0.1:{port.group(1)}"
            finally:
                forward.terminate()

    def freeze_engine(self, fleet: Fleet, pod: PodFacts) -> None:
        """Send SIGSTOP to the engine's core from within its container."""
        fleet.kubectl("exec", pod.name, "-c", "engine", "--", "python3", "-c", FREEZE)

    def kill_operators(self, installation: Installation) -> int:
        """Delete the pods without a grace period."""
        names = [pod["metadata"]["name"] for pod in installation.operators()]
        self.cluster.kubectl(
            *("-n", installation.namespace, "delete", "pod", "--force", "--grace-period=0"), *names
        )
        return len(names)

    def stop_prometheus(self) -> bool:
        """Return False: Prometheus is not ours."""
        return False

    def start_prometheus(self) -> None:
        """Do nothing: it never stopped."""


Stage = LocalStage | GivenStage
"""A cluster, and everything that the demo does to it."""


def _install(cluster: Cluster, values: dict[str, Any]) -> Installation:
    say("installing the chart with Helm")
    installation = Installation(cluster, values)
    installation.install()
    return installation


def desired_seed(image: str, script: str) -> list[dict[str, object]]:
    """Return a claim, and a job that writes the tiny model into it."""
    mounts = [
        {"name": "script", "mountPath": "/script", "readOnly": True},
        {"name": "models", "mountPath": "/models"},
    ]
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "write",
                "image": image,
                "command": ["python3", "-c", SEED],
                "securityContext": security,
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "script", "configMap": {"name": "tiny-model"}},
            {"name": "models", "persistentVolumeClaim": {"claimName": MODEL_CLAIM}},
        ],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": MODEL_CLAIM},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "tiny-model"},
            "data": {"tiny_model.py": script},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "tiny-model"},
            "spec": {"backoffLimit": 2, "template": {"spec": pod}},
        },
    ]
