"""Pods on the local node as tests speak of them, and what the machine holds of a node."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.images import builder
from tests.support.guards import GUARD_S

POLL_S = 0.2
T = TypeVar("T")
Manifest = dict[str, Any]


def until(question: Callable[[], T | None], what: str, timeout_s: float = GUARD_S) -> T:
    """The first answer that is neither None nor false.

    Raises:
        AssertionError: none came in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(POLL_S)
    return answer


def pod_manifest(name: str, image: str, script: str, **container: Any) -> Manifest:
    """A hardened pod (admitted by Pod Security "restricted") that runs a Python script."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "command": ["python3", "-u", "-c", script],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    **container,
                }
            ],
        },
    }


@dataclass(frozen=True)
class Pods:
    """The pods of one namespace."""

    cluster: ControlPlane
    namespace: str

    def kubectl(self, *args: str, input: str | None = None, timeout_s: float = GUARD_S) -> str:  # noqa: A002
        """Runs kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *args, input=input, timeout_s=timeout_s)

    def create(self, *manifests: Manifest) -> None:
        """Creates objects."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("create", "-f", "-", input=json.dumps(document))

    def get(self, name: str) -> Manifest | None:
        """The pod, or None."""
        found: Manifest | None = self.cluster.get(
            f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        )
        return found

    def container(self, name: str) -> Manifest:
        """The status of the pod's only container; empty until there is one."""
        pod = self.get(name) or {"status": {}}
        statuses = pod["status"].get("containerStatuses") or [{}]
        first: Manifest = statuses[0]
        return first

    def await_ready(self, *names: str) -> None:
        """Returns when the pods are Ready."""
        for name in names:
            until(lambda name=name: self.container(name).get("ready"), f"pod {name} Ready")  # type: ignore[misc]

    def await_ended(self, name: str) -> Manifest:
        """The `terminated` state of the pod's container, once it ended."""
        state: Manifest = until(
            lambda: self.container(name).get("state", {}).get("terminated"), f"pod {name} ended"
        )
        return state

    def logs(self, name: str) -> str:
        """What the pod printed."""
        return self.kubectl("logs", name)

    def run(self, name: str, image: str, script: str, **container: Any) -> str:
        """Runs a script in a pod to its end and returns what it printed.

        Raises:
            AssertionError: it ended with a status other than 0; the text is what it printed.
        """
        self.create(pod_manifest(name, image, script, **container))
        ended = self.await_ended(name)
        printed = self.logs(name)
        assert ended["exitCode"] == 0, printed
        return printed


@dataclass(frozen=True)
class MachineState:
    """What a node could leave behind on a machine."""

    processes: frozenset[str]
    mounts: frozenset[str]
    interfaces: frozenset[str]
    network_namespaces: frozenset[str]
    nft_tables: frozenset[str]
    cgroups: frozenset[str]
    sysctls: tuple[str, ...]
    strays: frozenset[str]


def machine_state(data: Path) -> MachineState:
    """The machine as it is, as far as a node with this data folder could have changed it."""
    return MachineState(
        processes=frozenset(
            " ".join(process.info["cmdline"])
            for process in psutil.process_iter(["cmdline"])
            if str(data) in " ".join(process.info["cmdline"] or ())
        ),
        mounts=mounts_outside(builder.store(), Path("/proc/self/mountinfo").read_text()),
        interfaces=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
        network_namespaces=frozenset(_lines(["ip", "netns", "list"])),
        nft_tables=frozenset(_lines(["nft", "list", "tables"])),
        cgroups=frozenset(
            str(path)
            for pattern in ("kubepods*", "*/kubepods*")
            for path in Path("/sys/fs/cgroup").glob(pattern)
        ),
        sysctls=tuple(
            Path("/proc/sys", name).read_text().strip()
            for name in ("net/ipv4/ip_forward", "vm/overcommit_memory", "kernel/panic")
        ),
        strays=frozenset(
            str(path)
            for folder in (
                "/run/containerd",
                "/var/lib/cni",
                "/var/lib/kubelet",
                "/var/log/containers",
                "/var/log/pods",
            )
            if Path(folder).exists()
            for path in [Path(folder), *Path(folder).rglob("*")]
        ),
    )


def mounts_outside(store: Path, mountinfo: str) -> frozenset[str]:
    """Return the mount points that are not in the image store.

    buildah mounts its store when a build begins and unmounts it when the last one ends. Builds
    of other tests and sessions share the store, so its mounts say nothing about a node.
    """
    points = (Path(line.split()[4]) for line in mountinfo.splitlines())
    return frozenset(str(point) for point in points if not point.is_relative_to(store))


def _lines(argv: Sequence[str]) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line]
