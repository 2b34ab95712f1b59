"""A development cluster for the demo: made by kind, k3d or minikube, as the user, in containers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY, cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.demo.cluster import Cluster, CommandError, Live
from fleetkeeper_local.existing_cluster import NoReadyNode, lines_of, observe_cluster

DEFAULT_NAME: Final = "fleetkeeper-demo"
ENGINES: Final = ("docker", "podman")
READY_S: Final = 300.0
POLL_S: Final = 2.0
MARK: Final[Live] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "fleetkeeper-demo", "namespace": "kube-system"},
    "data": {"createdBy": "make demo; make demo-down removes this cluster"},
}
"""In a cluster that the demo created. Another cluster that later gets the same name lacks it."""


class Tool(StrEnum):
    """A program that makes development clusters."""

    KIND = "kind"
    K3D = "k3d"
    MINIKUBE = "minikube"


@dataclass(frozen=True)
class Commands:
    """The commands of a tool. `{name}`, `{kubeconfig}` and `{archive}` are replaced."""

    names: str
    create: str
    kubeconfig: str
    load: str
    delete: str


COMMANDS: Final[Mapping[Tool, Commands]] = {
    # `kind load docker-image` asks docker even if podman runs the cluster (kind issue 2038).
    Tool.KIND: Commands(
        names="kind get clusters",
        create="kind create cluster --name {name} --kubeconfig {kubeconfig} --wait 5m",
        kubeconfig="kind export kubeconfig --name {name} --kubeconfig {kubeconfig}",
        load="kind load image-archive {archive} --name {name}",
        delete="kind delete cluster --name {name} --kubeconfig {kubeconfig}",
    ),
    # The default mode of an import copies the archive once more, and ends with 0 if a node fails.
    # The kubelet's default thresholds evict pods from a disk that is 85 % full (k3d's FAQ).
    Tool.K3D: Commands(
        names="k3d cluster list --no-headers",
        create="k3d cluster create {name} --kubeconfig-update-default=false --timeout 10m "
        "--k3s-arg --kubelet-arg=eviction-hard=imagefs.available<1%,nodefs.available<1%@server:* "
        "--k3s-arg --kubelet-arg=image-gc-high-threshold=100@server:*",
        kubeconfig="k3d kubeconfig write {name} --output {kubeconfig}",
        load="k3d image import {archive} --cluster {name} --mode direct",
        delete="k3d cluster delete {name}",
    ),
    # Its default of 2 CPUs and at most 6 GB is too small for two replicas.
    Tool.MINIKUBE: Commands(
        names="minikube profile list --light --output json",
        create="minikube start --profile {name} --cpus max --memory 10g --disk-size 40g",
        kubeconfig="minikube update-context --profile {name}",
        load="minikube image load {archive} --profile {name}",
        delete="minikube delete --profile {name}",
    ),
}


def require_programs(tool: Tool) -> str:
    """Return the container engine to use: docker or podman.

    Raises:
        LocalError: programs are missing or do not respond; the text names all of them.
    """
    lacks = [
        f"{name} is not on the PATH"
        for name in (tool.value, "kubectl", "helm")
        if shutil.which(name) is None
    ]
    answers = {name: _engine_problem(name) for name in ENGINES}
    engine = next((name for name, problem in answers.items() if problem is None), None)
    if engine is None:
        lacks.append("no container engine: " + "; ".join(filter(None, answers.values())))
    elif engine == "podman" and tool is Tool.K3D and not os.environ.get("DOCKER_HOST"):
        lacks.append("k3d reaches podman only with DOCKER_HOST and DOCKER_SOCK set (k3d's docs)")
    if lacks or engine is None:
        listed = "".join(f"\n  {lack}" for lack in lacks)
        raise LocalError(f"CLUSTER={tool} lacks programs, so nothing was started:{listed}")
    return engine


def _engine_problem(name: str) -> str | None:
    """Return why a container engine cannot be used, or None."""
    if shutil.which(name) is None:
        return f"{name} is not on the PATH"
    try:
        done = attempt(name, "info")
    except LocalError as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"`{name} info` failed: {said[-1] if said else done.returncode}"


@dataclass(frozen=True)
class DevCluster:
    """The cluster `name` of a tool."""

    tool: Tool
    name: str
    engine: str
    """docker or podman."""

    @property
    def directory(self) -> Path:
        """The directory of the kubeconfig and other files, all of which can be made again."""
        return cache_dir() / "demo-clusters" / f"{self.tool}-{self.name}"

    @property
    def kubeconfig(self) -> Path:
        """The cluster's own kubeconfig; the user's is not touched."""
        return self.directory / "kubeconfig"

    def ensure(self) -> Cluster:
        """Return the cluster; create it if it does not exist.

        Raises:
            LocalError: the tool failed, or the cluster cannot run the demo.
        """
        if self.exists():
            say(f"using the {self.tool} cluster {self.name}, which exists")
            cluster = self.connect()
        else:
            say(f"creating the {self.tool} cluster {self.name} (some minutes)")
            cluster = self._create()
        for line in lines_of(observe_cluster(self.kubeconfig)):
            say(line)
        return cluster

    def exists(self) -> bool:
        """Return whether the tool knows a cluster of this name."""
        said = self._run(COMMANDS[self.tool].names, capture=True)
        if self.tool is Tool.MINIKUBE:
            return self.name in {profile["Name"] for profile in json.loads(said)["valid"]}
        return self.name in {line.split()[0] for line in said.splitlines() if line.strip()}

    def load(self, archive: Path) -> None:
        """Load an archive of `docker save` into the nodes."""
        self._run(COMMANDS[self.tool].load, archive=archive)

    def connect(self) -> Cluster:
        """Return the cluster, which exists.

        Raises:
            LocalError: the tool has no kubeconfig of it.
        """
        self.kubeconfig.unlink(missing_ok=True)
        self._run(COMMANDS[self.tool].kubeconfig)
        return Cluster(self.kubeconfig, programs=_on_path)

    def delete(self) -> None:
        """Delete the cluster.

        Raises:
            LocalError: the tool failed.
        """
        self._run(COMMANDS[self.tool].delete)
        shutil.rmtree(self.directory, ignore_errors=True)

    def is_ours(self, cluster: Cluster) -> bool:
        """Return whether the demo created this cluster."""
        where = ("-n", MARK["metadata"]["namespace"], "get", "configmap", MARK["metadata"]["name"])
        try:
            return bool(cluster.kubectl(*where, "--ignore-not-found", "-o", "name").strip())
        except CommandError as error:
            delete = " ".join(self._argv(COMMANDS[self.tool].delete))
            raise LocalError(
                f"the {self.tool} cluster {self.name} does not say who created it: {error}; start it, "
                f"or delete it if it is yours to delete: {delete}"
            ) from error

    def call(self, *argv: str | Path, capture: bool = False) -> str:
        """Run a command in the repository; its output is visible, or returned with `capture`.

        Raises:
            LocalError: it failed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        shown = " ".join(map(str, argv))
        if not capture:
            say(shown)
        done = subprocess.run(
            [str(word) for word in argv],
            cwd=REPOSITORY,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LocalError(
                f"`{shown}` failed with exit code {done.returncode}; its output is above"
            )
        return done.stdout or ""

    def _create(self) -> Cluster:
        try:
            self._run(COMMANDS[self.tool].create)
            cluster = self.connect()
            self._await_node()
            cluster.apply(MARK)
        except BaseException:
            # Without the mark, `make demo-down` would take it for the user's.
            say(f"removing the incomplete cluster {self.name}")
            with suppress(LocalError):  # the first error says more
                self._run(COMMANDS[self.tool].delete)
            raise
        return cluster

    def _await_node(self) -> None:
        """Wait for a Ready node; k3d returns before it registers."""
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                observe_cluster(self.kubeconfig)
            except NoReadyNode:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def _run(self, command: str, *, capture: bool = False, **values: str | Path) -> str:
        return self.call(*self._argv(command, **values), capture=capture)

    def _argv(self, command: str, **values: str | Path) -> list[str]:
        known = {"name": self.name, "kubeconfig": self.kubeconfig, **values}
        return [word.format(**known) for word in command.split()]

    def _environment(self) -> dict[str, str]:
        """Return the environment of the commands: minikube takes the kubeconfig from there."""
        provider = {"KIND_EXPERIMENTAL_PROVIDER": "podman"} if self.engine == "podman" else {}
        return {
            **provider,
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            # Images stay the same if nothing changed, so that they are loaded once.
            "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
            "DOCKER_BUILDKIT": "1",
        }


def _on_path(name: str) -> Path:
    return Path(shutil.which(name) or name)
