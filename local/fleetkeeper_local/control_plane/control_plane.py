"""A real Kubernetes control plane on free ports of one address: no root, no containers.

It runs etcd, kube-apiserver, kube-controller-manager and optionally kube-scheduler and kwok, with
its own certificates, RBAC, the Node authorizer and an audit log. Several can run side by side. Most
tests run on it, and the real node is built on it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from fleetkeeper_local.common import lock
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.control_plane import flags, probes
from fleetkeeper_local.control_plane.access import STATE_FILE, Access, Endpoint
from fleetkeeper_local.control_plane.fake_nodes import FakeNodes
from fleetkeeper_local.control_plane.kubeconfig import write_kubeconfig
from fleetkeeper_local.control_plane.pki import Authority, ensure_signing_key
from fleetkeeper_local.control_plane.ports import PortInUse, require_free
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.control_plane.programs import build_programs

START_TIMEOUT_S = 120.0
"""Generous: a start takes 3 s on an idle machine and half a minute under a load average of 20."""
PORT_ATTEMPTS = 5


class ControlPlane(Access):
    """A control plane; as a context manager, it starts and stops itself.

    Example:
        >>> with ControlPlane() as plane:
        ...     plane.kubectl("create", "namespace", "a")
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        scheduler: bool = True,
        tied: bool = True,
        endpoint: Endpoint | None = None,
        real_node: bool = False,
    ) -> None:
        """Describe a control plane; `start` runs it.

        Args:
            directory: the data directory; by default a temporary one that `stop` removes.
            scheduler: whether pods are scheduled.
            tied: whether the processes end with the thread that starts them.
            endpoint: address and ports; by default free ones on 127.0.0.1.
            real_node: whether a real kubelet runs real pods behind the API server.
        """
        self._temporary = directory is None
        folder = directory or Path(tempfile.mkdtemp(prefix="fleetkeeper-"))
        super().__init__(folder, endpoint, Processes(folder, tied=tied))
        self._scheduler = scheduler
        self._real_node = real_node
        self._fake_nodes = FakeNodes(self, taint=real_node)

    # -- lifecycle ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Start what is not running; return once the API is ready and the controllers work.

        Raises:
            LocalError: a component failed; everything that this call started was stopped again.
        """
        build_programs(["fleetkeeper-node"])
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = set(self.processes.names())
        fixed = self.is_described()
        for attempt in range(PORT_ATTEMPTS):
            try:
                self._start_once()
            except PortInUse:
                self._undo(before)
                # Ports that we chose were taken in the meantime: choose others.
                if fixed or attempt == PORT_ATTEMPTS - 1:
                    raise
                self._endpoint = None
                (self.directory / STATE_FILE).unlink(missing_ok=True)
                shutil.rmtree(self.pki, ignore_errors=True)
            except BaseException:
                self._undo(before)
                raise
            else:
                return self
        return self

    def stop(self) -> None:
        """Stop all components; remove the data directory if it is a temporary one."""
        if self._temporary:
            # No data is kept, so the order does not matter.
            self.processes.kill(self.processes.names())
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            names = self.processes.names()
            self.processes.stop([name for name in names if name != "etcd"])
            self.processes.stop(["etcd"])

    def healthy(self) -> bool:
        """Return whether every component runs and the API server is ready."""
        names = ["etcd", "kube-apiserver", "kube-controller-manager"]
        names += ["kube-scheduler"] if self._scheduler else []
        names += ["kwok"] if "kwok" in self.processes.names() else []
        return all(self.processes.running(name) for name in names) and self._api_ready()

    def __enter__(self) -> Self:
        """Start the control plane."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the control plane."""
        self.stop()

    def add_nodes(
        self, count: int, gpus: int = 8, labels: Mapping[str, str] | None = None
    ) -> list[str]:
        """Add fake nodes with GPUs (kwok) and return their names once all are Ready.

        Pods scheduled to them become Running and Ready without a container.

        Args:
            count: the number of nodes to add.
            gpus: `nvidia.com/gpu` of each node; 0 for none.
            labels: labels of the nodes in addition to `type=kwok` and the usual ones.
        """
        return self._fake_nodes.add(count, gpus, labels or {})

    def ensure_nodes(self, count: int, gpus: int = 8) -> None:
        """Add fake nodes until there are `count` of them."""
        missing = count - len(self._fake_nodes.names())
        if missing > 0:
            self.add_nodes(missing, gpus)
        else:
            self._fake_nodes.ensure_kwok()

    # -- internal -----------------------------------------------------------------------------

    def _start_once(self) -> None:
        if self._endpoint is None:
            self._endpoint = self.read_endpoint() or Endpoint.free()
        endpoint = self._endpoint
        self._write_files()
        self._check_ports()
        fake_nodes = "kwok" in self.processes.names()
        self.processes.start("etcd", flags.etcd(self.directory, endpoint))
        self.processes.await_ready(
            "etcd", lambda: probes.listens("127.0.0.1", endpoint.etcd), START_TIMEOUT_S
        )
        self.processes.start(
            "kube-apiserver", flags.apiserver(self.directory, endpoint, real_node=self._real_node)
        )
        self.processes.await_ready("kube-apiserver", self._api_ready, START_TIMEOUT_S)
        self.processes.start(
            "kube-controller-manager",
            flags.controller_manager(self.directory, endpoint, real_node=self._real_node),
        )
        if self._scheduler:
            self.processes.start("kube-scheduler", flags.scheduler(self.directory, endpoint))
        # Pods are rejected until the controllers have created the namespace's ServiceAccount.
        self.processes.await_ready(
            "kube-controller-manager", self._has_default_account, START_TIMEOUT_S
        )
        if self._scheduler:
            self.processes.await_ready("kube-scheduler", self._schedules, START_TIMEOUT_S)
        if fake_nodes:
            self._fake_nodes.ensure_kwok()

    def _check_ports(self) -> None:
        for name, host, port in (
            ("etcd", "127.0.0.1", self.endpoint.etcd),
            ("kube-apiserver", self.endpoint.host, self.endpoint.api),
            ("kube-controller-manager", "127.0.0.1", self.endpoint.controller_manager),
            ("kube-scheduler", "127.0.0.1", self.endpoint.scheduler),
        ):
            if self.processes.running(name) is None:
                require_free(host, port, name)

    def _write_files(self) -> None:
        """Write the certificates, the kubeconfigs, the audit policy and the ports."""
        endpoint = self.endpoint
        write_file(self.directory / STATE_FILE, json.dumps(asdict(endpoint), indent=1) + "\n")
        etcd_ca = Authority(self.pki, "etcd-ca").ensure()
        etcd_ca.issue("etcd", "etcd", hosts=["127.0.0.1"], server=True)
        etcd_ca.issue("apiserver-etcd", "apiserver")
        front_ca = Authority(self.pki, "front-ca").ensure()
        front_ca.issue("front-proxy", "front-proxy")
        ca = Authority(self.pki, "ca").ensure()
        service_names = [
            f"kubernetes{rest}" for rest in ("", ".default", ".default.svc", flags.CLUSTER_SUFFIX)
        ]
        ca.issue(
            "apiserver",
            "kube-apiserver",
            hosts=[*service_names, "localhost", "127.0.0.1", endpoint.host, flags.SERVICE_API_IP],
            server=True,
        )
        ca.issue("apiserver-kubelet", flags.KUBELET_CLIENT)
        ca.issue("kube-scheduler-server", "kube-scheduler", hosts=["127.0.0.1"], server=True)
        ensure_signing_key(self.pki, "sa")
        for name, user, groups in (
            ("admin", "admin", ["system:masters"]),
            ("kube-controller-manager", "system:kube-controller-manager", []),
            ("kube-scheduler", "system:kube-scheduler", []),
            ("kwok", "system:kwok", []),
        ):
            identity = ca.issue(name, user, groups=groups)
            write_kubeconfig(
                self.directory / f"{name}.kubeconfig",
                self.apiserver_url,
                self.ca_file,
                user,
                identity,
            )
        flags.write_configs(self.directory)

    def _api_ready(self) -> bool:
        return probes.answers_ok(f"{self.apiserver_url}/readyz", self.context())

    def _has_default_account(self) -> bool:
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        return probes.answers_ok(self.apiserver_url + path, self.context())

    def _schedules(self) -> bool:
        """Return whether the scheduler has synced; its certificate proves that it is ours."""
        url = f"https://127.0.0.1:{self.endpoint.scheduler}/readyz"
        return probes.answers_ok(url, probes.client_context(self.ca_file, None))

    def _undo(self, before: set[str]) -> None:
        """Kill what a failed start had started."""
        self.processes.kill([name for name in self.processes.names() if name not in before])


def remove(directory: Path) -> None:
    """Stop a control plane that an earlier call started in `directory` and remove its data.

    Raises:
        LocalError: the directory is not a cluster's, or cannot be removed completely.
    """
    lock.require_folder(directory)
    processes = Processes(directory, tied=False)
    processes.stop(processes.names())
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        raise LocalError(f"{directory} cannot be removed completely; check what is left in it")
