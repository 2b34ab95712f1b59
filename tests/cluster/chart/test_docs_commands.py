"""Commands in README and docs run, as they stand there, against a real API server with the operator.

The service is team-a/chat, as in every page; its pods are fake ones that become ready. Each page starts
with the service as it was made; the page about the first service starts without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.program_table import KUBERNETES_VERSION
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.docs_commands import blocks_by_page, run_blocks
from tests.support.lanes import keep_first
from tests.support.plane.crds import install_crds
from tests.support.plane.plane_state import claim_namespace, mend, state_of

BLOCKS = blocks_by_page("cluster")
ONCE = {
    tuple(block.commands for block in blocks): page for page, blocks in reversed(BLOCKS.items())
}
"""Pages by what they run: many runbooks begin with the same look, which is taken once."""
NAMESPACE = "team-a"
FIRST_SERVICE = "docs/first-service.md"
READ_FIRST = ("README.md", FIRST_SERVICE)
PAGES_BY_READER = [*READ_FIRST, *sorted(set(ONCE.values()) - set(READ_FIRST))]
CHAT: dict[str, Any] = {
    "apiVersion": "fleetkeeper.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat", "namespace": NAMESPACE},
    "spec": {
        "model": {"source": "pvc://models/chat"},
        "resources": {"cpu": "100m", "memory": "128Mi"},
    },
}
ROUTER_ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "fleetkeeper-router"},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "",
        "volumeName": "docs-models",
    },
}
VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "docs-models"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": NAMESPACE, "name": "models"},
        "persistentVolumeReclaimPolicy": "Retain",
    },
}


HELM = """#!/bin/sh
case "$1" in template) set -- "$@" --kube-version {version} ;; esac
exec {program} "$@"
"""
"""A released Helm takes a recent Kubernetes for granted when it renders; one built from its module 1.20."""


@dataclass(frozen=True)
class Fleet:
    """A cluster with the operator in it, and how a reader's shell sees it."""

    plane: ControlPlane
    environment: dict[str, str]

    def reset(self) -> None:
        """The service chat as it was made, whatever the page before did to it."""
        there = self.plane.kubectl(
            "-n", NAMESPACE, "get", "fis", "--ignore-not-found", "-o", "name"
        )
        if there.strip():
            spec = json.dumps([{"op": "replace", "path": "/spec", "value": CHAT["spec"]}])
            self.plane.kubectl("-n", NAMESPACE, "patch", "fis", "chat", "--type=json", "-p", spec)
        else:
            self.plane.kubectl("create", "-f", "-", input=json.dumps(CHAT))

    def empty(self) -> None:
        """No service yet, nor what it became."""
        self.plane.kubectl("-n", NAMESPACE, "delete", "fis", "chat", "--ignore-not-found")
        self.plane.kubectl(
            *("-n", NAMESPACE, "wait", "--for=delete", "deployments", "--all", "--timeout=300s")
        )

    def wait_ready(self) -> None:
        """Until it serves."""
        wait = ("-n", NAMESPACE, "wait", "--for=condition=Ready", "fis/chat", "--timeout=300s")
        try:
            self.plane.kubectl(*wait)
        except KubectlError:
            if not mend(self.plane):
                raise
            self.plane.kubectl(*wait)


@pytest.fixture(scope="module")
def fleet(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The operator, started as a process, and the namespace of the pages."""
    scratch = tmp_path_factory.mktemp("docs")
    _prepare(control_plane)
    clean = {key: value for key, value in os.environ.items() if "FLEETKEEPER" not in key}
    clean["KUBECONFIG"] = str(control_plane.kubeconfig)
    with (scratch / "operator.log").open("wb") as log:
        operator = subprocess.Popen(
            [Path(sys.executable).with_name("fleetkeeper"), "run"],
            env={
                **clean,
                "POD_UID": "docs",
                "FLEETKEEPER_NAMESPACES": json.dumps([NAMESPACE]),
                "FLEETKEEPER_OPERATOR_NAMESPACE": NAMESPACE,
                "FLEETKEEPER_LISTEN_ADDRESS": "127.0.0.1",
                "FLEETKEEPER_LISTEN_PORT": str(free_ports(1)[0]),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        found = Fleet(control_plane, {**clean, **_shell(scratch)})
        found.reset()
        try:
            found.wait_ready()
        except KubectlError as problem:
            said = (scratch / "operator.log").read_text()[-3000:]
            cluster = state_of(control_plane)
            raise AssertionError(f"the service is not ready:\n{said}\n{cluster}") from problem
        yield found
        assert operator.poll() is None, (scratch / "operator.log").read_text()[-3000:]
    finally:
        operator.kill()
        operator.wait()
        control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        control_plane.kubectl("delete", "persistentvolume", "docs-models", "--wait=false")


def _prepare(plane: ControlPlane) -> None:
    install_crds(plane)
    plane.add_nodes(1, gpus=8)
    claim_namespace(plane, NAMESPACE)
    for manifest in (ROUTER_ROLE, VOLUME):
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))
    plane.kubectl("-n", NAMESPACE, "apply", "--server-side", "-f", "-", input=json.dumps(CLAIM))


def _shell(scratch: Path) -> dict[str, str]:
    """A home of its own, and kubectl, helm and fleetkeeper by their names."""
    binaries = scratch / "bin"
    binaries.mkdir()
    (binaries / "kubectl").symlink_to(program_path("kubectl"))
    helm = binaries / "helm"
    helm.write_text(HELM.format(program=program_path("helm"), version=KUBERNETES_VERSION))
    helm.chmod(0o755)
    path = f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert shutil.which("kubectl", path=path) == str(binaries / "kubectl")
    return {"PATH": path, "HOME": str(scratch), "COLUMNS": "140"}


@pytest.mark.parametrize(
    "page", keep_first(len(READ_FIRST), PAGES_BY_READER, pytest.mark.exhaustive)
)
def test_commands_of_a_page_run(fleet: Fleet, page: str, tmp_path: Path) -> None:
    """In order, in one shell; none may fail."""
    if page == FIRST_SERVICE:
        fleet.empty()
    else:
        fleet.reset()
    run_blocks(BLOCKS[page], tmp_path, fleet.environment, timeout_s=240)


@pytest.mark.exhaustive
def test_what_the_pages_say_of_a_service_is_seen(fleet: Fleet, tmp_path: Path) -> None:
    """The first looks of troubleshooting show what they promise."""
    fleet.reset()
    fleet.wait_ready()
    said = run_blocks(BLOCKS["docs/troubleshooting.md"], tmp_path, fleet.environment, timeout_s=120)
    for word in ("READY", "WANTED", "BREAKER", "Conditions:", "current state", "chat-fk-router"):
        assert word in said
