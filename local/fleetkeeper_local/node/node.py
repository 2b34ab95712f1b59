"""A real single-node Kubernetes on this machine: control plane, containerd, kubelet, DNS."""

from __future__ import annotations

import concurrent.futures
import shutil
import time
from pathlib import Path

from fleetkeeper_local.common import lock, packages
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.report import say
from fleetkeeper_local.control_plane import probes, programs
from fleetkeeper_local.control_plane.access import Endpoint
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.kubeconfig import write_kubeconfig
from fleetkeeper_local.control_plane.pki import Authority
from fleetkeeper_local.control_plane.ports import is_free, require_free
from fleetkeeper_local.control_plane.processes import ComponentFailed, Processes
from fleetkeeper_local.images import oci, registry
from fleetkeeper_local.node import addons, cleanup, flags, hostnet, preflight
from fleetkeeper_local.node.settings import NodeSettings
from fleetkeeper_local.node.weight import raise_weights

START_TIMEOUT_S = 120.0
_NO_CRI = "server is not initialized yet"
STOP_ORDER = (
    "prometheus",
    "kwok",
    "kube-proxy",
    "kubelet",
    "kube-scheduler",
    "kube-controller-manager",
    "kube-apiserver",
    "etcd",
    "registry",
)
"""Clients of the API server stop before it. containerd stops last, after the containers."""
KEPT = ("containerd", "registry", "image-layouts")
"""Images stay after `down`, so that the next start pulls nothing."""


class Node:
    """The node of one data directory."""

    def __init__(self, settings: NodeSettings) -> None:
        """Describe the node; `up` starts it."""
        self.settings = settings
        self.directory = settings.directory
        self.processes = Processes(self.directory, tied=False)
        self.plane = ControlPlane(self.directory, tied=False, real_node=True)
        self._started_s = 0.0

    # -- up -----------------------------------------------------------------------------------

    def up(self) -> bool:
        """Start what is not running; return once pods can run and names resolve.

        Returns:
            False if everything ran already and nothing was done.

        Raises:
            LocalError: something is missing, in the way, or failed; what this call started is
                stopped.
        """
        lock.claim_folder(self.directory)
        with lock.exclusive(self.directory):
            if self.healthy():
                return False
            self._prepare()
            before = set(self.processes.names())
            try:
                self._start()
            except BaseException:
                self._undo(before)
                raise
            return True

    def healthy(self) -> bool:
        """Return whether every component runs and the node is Ready."""
        if not all(self.processes.running(name) for name in self._components()):
            return False
        return self.plane.healthy() and self._node_ready()

    def _components(self) -> list[str]:
        names = [name for name in STOP_ORDER if name != "kwok"]
        if not self.settings.prometheus:
            names.remove("prometheus")
        return [*names, "containerd"]

    def _pids(self) -> list[int]:
        found = (self.processes.running(name) for name in self._components())
        return [process.pid for process in found if process is not None]

    def _prepare(self) -> None:
        """Check everything that can fail before anything is started."""
        preflight.check_machine(self.settings)
        packages.ensure_packages(packages.NODE_PACKAGES)
        preflight.check_kernel()
        lock.claim_machine(self.directory)
        self._check_ports()
        wanted = ["fleetkeeper-node", *flags.RUNTIME_PROGRAMS, "coredns", "pause"]
        programs.build_programs([*wanted, *(["prometheus"] if self.settings.prometheus else [])])

    def _check_ports(self) -> None:
        settings = self.settings
        own = settings.node_ip
        has_bridge = is_free(own, 0)
        wanted = [
            ("registry", "127.0.0.1", settings.registry_port),
            ("kube-apiserver", own, settings.api_port),
            ("kubelet", own, flags.KUBELET_PORT),
            ("kube-proxy", "127.0.0.1", 10256),
        ]
        if settings.prometheus:
            wanted.append(("prometheus", own, settings.prometheus_port))
        for name, host, port in wanted:
            if self.processes.running(name) is None:
                require_free(host, port, name, exists=host != own or has_bridge)

    def _start(self) -> None:
        self._started_s = time.monotonic()
        settings = self.settings
        flags.write_settings(settings)
        hostnet.remember_sysctls(self.directory / "sysctls.json")
        hostnet.ensure_bridge(settings)
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            runtime = pool.submit(self._start_runtime)
            plane = pool.submit(self._start_plane)
            coredns_image = runtime.result()
            plane.result()
        self._start_node()
        self._apply_addons(coredns_image)
        raise_weights(self._pids())
        self._await_dns()

    def _start_plane(self) -> None:
        if not self.plane.is_described():
            self.plane.use_endpoint(
                Endpoint.free(self.settings.node_ip, api=self.settings.api_port)
            )
        self.plane.start()
        self._mark("the API server is ready")

    def _start_runtime(self) -> str:
        """Start the registry (with the two images that every start needs) and containerd.

        Returns:
            CoreDNS's image.
        """
        settings = self.settings
        config = self.directory / "registry.yaml"
        registry.write_registry_config(config, self.directory / "registry", settings.registry_port)
        self.processes.start("registry", flags.registry(settings))
        self.processes.await_ready(
            "registry",
            lambda: probes.answers_ok(f"http://127.0.0.1:{settings.registry_port}/v2/"),
            START_TIMEOUT_S,
        )
        pause = self._ensure_binary_image("pause")
        coredns = self._ensure_binary_image("coredns")
        flags.write_node_configs(settings, pause)
        self.processes.start("containerd", flags.containerd(settings))
        self.processes.await_ready(
            "containerd", settings.containerd_socket.is_socket, START_TIMEOUT_S
        )
        self._mark("containerd and the registry are running")
        return coredns

    def _ensure_binary_image(self, name: str) -> str:
        """Return an image of one static binary in the registry, tagged with the binary's digest."""
        binary = programs.program_path(name)
        tag = binary.parent.name.rsplit("-", 1)[1]
        port = self.settings.registry_port
        if not registry.has_image(port, name, tag):
            layouts = self.directory / "image-layouts"
            layer = oci.write_layer(binary.parent, "", layouts / f"{name}-{tag}.layer")
            config = oci.ImageConfig(entrypoint=[f"/{name}"], user=str(addons.NOBODY_UID))
            layout = oci.write_image(layouts / f"{name}-{tag}", [layer], config)
            registry.push(f"oci:{layout}:1", port, name, tag)
        return registry.reference(port, name, tag)

    def _start_node(self) -> None:
        """Start the kubelet and kube-proxy, and return once the node is Ready."""
        settings = self.settings
        authority = Authority(self.plane.pki, "ca")
        node_user = f"system:node:{settings.node_name}"
        authority.issue(
            "kubelet-serving",
            node_user,
            groups=["system:nodes"],
            hosts=[settings.node_name, settings.node_ip],
            server=True,
        )
        for name, user, groups in (
            ("kubelet", node_user, ["system:nodes"]),
            ("kube-proxy", "system:kube-proxy", []),
            ("prometheus", addons.PROMETHEUS_USER, []),
        ):
            write_kubeconfig(
                self.directory / f"{name}.kubeconfig",
                self.plane.apiserver_url,
                self.plane.ca_file,
                user,
                authority.issue(name, user, groups=groups),
            )
        self.processes.start("kube-proxy", flags.kube_proxy(settings))
        self._start_kubelet()
        self.processes.await_ready(
            "kube-proxy", lambda: probes.answers_ok("http://127.0.0.1:10256/livez"), START_TIMEOUT_S
        )
        self._mark("the node is Ready")

    def _start_kubelet(self) -> None:
        """Start the kubelet, again while containerd does not serve CRI yet: it asks once, and ends."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.processes.start("kubelet", flags.kubelet(self.settings))
            try:
                self.processes.await_ready("kubelet", self._node_ready, START_TIMEOUT_S)
            except ComponentFailed as error:
                last = str(error).rpartition("\n")[2]
                if _NO_CRI not in last or time.monotonic() > deadline:
                    raise
            else:
                return

    def _apply_addons(self, coredns_image: str) -> None:
        manifests = [*addons.desired_access(), *addons.desired_dns(coredns_image)]
        if self.settings.prometheus:
            manifests += addons.desired_monitoring(self.settings)
        self.plane.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            "-",
            input=addons.as_list(manifests),
        )
        if self.settings.prometheus:
            addons.write_prometheus_config(self.settings)
            self.processes.start("prometheus", addons.prometheus(self.settings))

    def _await_dns(self) -> None:
        self.plane.kubectl(
            *("-n", "kube-system", "rollout", "status", "deployment/coredns"),
            f"--timeout={START_TIMEOUT_S:.0f}s",
            timeout_s=START_TIMEOUT_S + 10,
        )
        if self.settings.prometheus:
            url = f"{self.prometheus_url}/-/ready"
            self.processes.await_ready(
                "prometheus", lambda: probes.answers_ok(url), START_TIMEOUT_S
            )
        self._mark("DNS is ready")

    def _node_ready(self) -> bool:
        node = self.plane.get(f"/api/v1/nodes/{self.settings.node_name}")
        conditions = node["status"].get("conditions", ()) if node else ()
        # After a kill the condition stays True for a while, so the kubelet must run too.
        return self.processes.running("kubelet") is not None and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in conditions
        )

    def _mark(self, what: str) -> None:
        say(f"{what} ({time.monotonic() - self._started_s:.1f} s)")

    def _undo(self, before: set[str]) -> None:
        """Stop what a failed start had started; if nothing ran before, remove everything."""
        if before:
            self.processes.kill([name for name in self.processes.names() if name not in before])
        else:
            self._take_down()

    # -- down ---------------------------------------------------------------------------------

    def down(self, *, purge: bool = False) -> None:
        """Stop and remove everything except the images (those too with `purge`).

        Raises:
            LocalError: the directory is not a cluster's, or something cannot be stopped.
        """
        lock.require_folder(self.directory)
        with lock.exclusive(self.directory):
            self._take_down()
        if purge:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _take_down(self) -> None:
        self.processes.stop([name for name in STOP_ORDER if name in self.processes.names()])
        if self.processes.running("containerd") is not None:
            cleanup.remove_containers(self.settings)
        self.processes.stop(["containerd"])
        cleanup.end_shims(self.settings)
        cleanup.remove_kernel_state(self.settings)
        hostnet.restore_sysctls(self.directory / "sysctls.json")
        for path in self.directory.iterdir():
            if path.name in (*KEPT, lock.MARKER, "lock"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        lock.release_machine(self.directory)

    # -- use ----------------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.plane.kubeconfig

    @property
    def prometheus_url(self) -> str:
        """The URL of Prometheus, from the host and from pods."""
        return f"http://{self.settings.node_ip}:{self.settings.prometheus_port}"

    def load_image(self, source: str, name: str, tag: str) -> str:
        """Put an image into the cluster's registry; return the name by which pods pull it.

        Args:
            source: a tar archive (docker or OCI), or anything that skopeo reads.
            name: repository name in the registry.
            tag: its tag.
        """
        if self.processes.running("registry") is None:
            raise LocalError("the registry is not running; start the node: fleetkeeper local up")
        return registry.push(_skopeo_source(source), self.settings.registry_port, name, tag)


def _skopeo_source(source: str) -> str:
    path = Path(source)
    if not path.exists():
        return source
    return f"oci:{path}" if path.is_dir() else f"docker-archive:{path}"
