"""Where the demo plays: the local node, or a cluster that the user has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from fleetkeeper_local.demo import inject
from fleetkeeper_local.demo.cluster import Cluster
from fleetkeeper_local.demo.fleet import Fleet, PodFacts
from fleetkeeper_local.demo.installation import (
    MODEL_CLAIM,
    Installation,
    install_on_node,
    put_model,
)
from fleetkeeper_local.errors import LocalError
from fleetkeeper_local.node import Node
from fleetkeeper_local.paths import REPOSITORY
from fleetkeeper_local.report import say

FREEZE = """
import os, signal
from pathlib import Path
for folder in Path("/proc").iterdir():
    if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
        os.kill(int(folder.name), signal.SIGSTOP)
"""
SEED = "import sys; sys.path.insert(0, '/script'); import tiny_model; from pathlib import Path; tiny_model.write(Path('/models/tiny'))"


class Stage(Protocol):
    """A cluster with everything that the demo does to it."""

    cluster: Cluster

    def install(self) -> Installation:
        """Installs the product."""

    def put_model(self, namespace: str) -> None:
        """Makes the claim `models` with the tiny model in it."""

    def address(self, fleet: Fleet) -> Iterator[str]:
        """Yields the API's address from here."""

    def freeze_engine(self, fleet: Fleet, pod: PodFacts) -> None:
        """Stops an engine's core."""

    def kill_operators(self, installation: Installation) -> int:
        """Kills every operator process; how many."""

    def stop_prometheus(self) -> bool:
        """Whether there was one that may be stopped."""

    def start_prometheus(self) -> None:
        """Starts it again."""


@dataclass
class LocalStage:
    """The node of this machine, which is ours to break."""

    node: Node

    def __post_init__(self) -> None:
        """Starts the node where it does not run."""
        self.node.up()
        self.cluster = Cluster(self.node.kubeconfig)

    def install(self) -> Installation:
        """Images from this checkout, into the node's registry."""
        return install_on_node(self.node)

    def put_model(self, namespace: str) -> None:
        """A folder of this machine."""
        put_model(self.cluster, self.node, namespace)

    def address(self, fleet: Fleet) -> Iterator[str]:
        """The Service's own address: this machine is the cluster's node."""
        yield fleet.base_url()

    def freeze_engine(self, fleet: Fleet, pod: PodFacts) -> None:
        """SIGSTOP, by the pod's cgroup."""
        del fleet
        inject.freeze_engine(pod)

    def kill_operators(self, installation: Installation) -> int:
        """SIGKILL, by the pods' cgroups."""
        return inject.kill_operators(installation)

    def stop_prometheus(self) -> bool:
        """Ends the node's Prometheus."""
        self.node.processes.stop(["prometheus"])
        return True

    def start_prometheus(self) -> None:
        """As `local up` heals it."""
        self.node.up()


@dataclass
class GivenStage:
    """A cluster of the user's: nothing outside the demo's own pods is touched.

    `values` is the chart's values file with the names of images that the cluster can pull.
    """

    cluster: Cluster
    values: Path

    def install(self) -> Installation:
        """With the user's values."""
        installation = Installation(self.cluster, yaml.safe_load(self.values.read_text()) or {})
        say("installing the chart by Helm")
        installation.install()
        return installation

    def put_model(self, namespace: str) -> None:
        """A job with the engine's image writes the model into a claim of the default class."""
        profiles = (yaml.safe_load(self.values.read_text()) or {}).get("engineProfiles") or {}
        images = [p["image"] for name, p in profiles.items() if name.startswith("cpu") and p]
        if not images:
            raise LocalError(f"{self.values} names no image of a cpu profile: engineProfiles")
        script = (REPOSITORY / "scripts" / "tiny_model.py").read_text()
        self.cluster.apply(*desired_seed(images[0], script), namespace=namespace)
        self.cluster.kubectl(
            *("-n", namespace, "wait", "--for=condition=Complete", "job/tiny-model"),
            "--timeout=600s",
            timeout_s=620,
        )

    def address(self, fleet: Fleet) -> Iterator[str]:
        """Through a port-forward."""
        argv = fleet.cluster.argv(
            *("-n", fleet.namespace, "port-forward", f"service/{fleet.name}", ":80")
        )
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as forward:
            try:
                line = forward.stdout.readline() if forward.stdout else ""
                port = re.search(r"127\.0\.0\.1:(\d+)", line)
                if port is None:
                    raise LocalError(f"kubectl port-forward did not begin: {line.strip()}")
                yield f"http://127.0.0.1:{port.group(1)}/v1"
            finally:
                forward.terminate()

    def freeze_engine(self, fleet: Fleet, pod: PodFacts) -> None:
        """From within the pod's own container."""
        fleet.kubectl("exec", pod.name, "-c", "engine", "--", "python3", "-c", FREEZE)

    def kill_operators(self, installation: Installation) -> int:
        """Deletes the pods without any grace."""
        names = [pod["metadata"]["name"] for pod in installation.operators()]
        self.cluster.kubectl(
            *("-n", installation.namespace, "delete", "pod", "--force", "--grace-period=0"), *names
        )
        return len(names)

    def stop_prometheus(self) -> bool:
        """It is not ours."""
        return False

    def start_prometheus(self) -> None:
        """It never stopped."""


@contextmanager
def reached(stage: Stage, fleet: Fleet) -> Iterator[str]:
    """The API's address while the block runs."""
    yield from stage.address(fleet)


def desired_seed(image: str, script: str) -> list[dict[str, object]]:
    """A claim, and a job that writes the tiny model into it."""
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
