"""Removes what a node leaves in the kernel: containers, mounts, namespaces, rules, cgroups."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from fleetkeeper_local import hostnet
from fleetkeeper_local.nodeflags import CNI_NETWORK
from fleetkeeper_local.settings import NodeSettings
from fleetkeeper_local.shell import attempt

CGROUPS = Path("/sys/fs/cgroup")
CNI_STATE = Path("/var/lib/cni")
CNI_RESULTS = CNI_STATE / "results"
CONTAINER_LOGS = Path("/var/log/containers")
KUBELET_DEFAULT = Path("/var/lib/kubelet")
"""The kubelet makes a device-plugins folder here whatever its root folder is."""
SHIM_STATE = Path("/run/containerd")
END_TIMEOUT_S = 10.0


def remove_containers(settings: NodeSettings) -> None:
    """Ends every container through containerd, while that still runs."""
    ctr = ("ctr", "--address", settings.containerd_socket, "--namespace", "k8s.io")
    tasks = attempt(*ctr, "task", "list", "--quiet").stdout.split()
    if tasks:
        attempt(*ctr, "task", "rm", "--force", *tasks)
    containers = attempt(*ctr, "container", "list", "--quiet").stdout.split()
    if containers:
        attempt(*ctr, "container", "rm", *containers)


def end_shims(settings: NodeSettings) -> None:
    """Ends the shims of this node's containers, and what still runs under them.

    For the case that containerd was gone: a shim is known by the socket on its command line.
    """
    socket = str(settings.containerd_socket)
    shims = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if (process.info["name"] or "").startswith("containerd-shim")
        and socket in (process.info["cmdline"] or ())
    ]
    family: list[psutil.Process] = []
    for shim in shims:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [*shim.children(recursive=True), shim]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=END_TIMEOUT_S)


def remove_kernel_state(settings: NodeSettings) -> None:
    """Removes mounts, network namespaces, interfaces, rules, cgroups and files outside our folder."""
    namespaces = hostnet.namespaces_on(CNI_RESULTS, CNI_NETWORK)
    unmount_below(settings.directory)
    hostnet.remove_namespaces(namespaces)
    hostnet.remove_bridge(settings.bridge)
    hostnet.remove_proxy_rules()
    remove_cgroups()
    _remove_strays(settings.directory)


def unmount_below(directory: Path) -> None:
    """Unmounts everything mounted on or below a folder, deepest first."""
    for point in reversed(mounts_below(directory)):
        if attempt("umount", point).returncode:
            attempt("umount", "--lazy", point)


def mounts_below(directory: Path) -> list[str]:
    """Mount points on or below a folder, sorted so that a parent comes before its children."""
    root = str(directory.resolve())
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Field 5 is the mount point; spaces in it are written \\040 (proc_pid_mountinfo(5)).
        point = line.split()[4].encode().decode("unicode_escape")
        if point == root or point.startswith(root + "/"):
            points.append(point)
    return sorted(points)


def remove_cgroups() -> None:
    """Removes the `kubepods` groups of every hierarchy, waiting for their last processes."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (roots := kubepods_cgroups()) and time.monotonic() < deadline:
        for root in roots:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # busy until its last process is reaped
                    Path(folder).rmdir()
        time.sleep(0.05)


def kubepods_cgroups() -> list[Path]:
    """The kubelet's groups, in cgroup v1 and v2."""
    return sorted([*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")])


def _remove_strays(directory: Path) -> None:
    for path in CNI_RESULTS.glob(f"{CNI_NETWORK}-*"):
        sandbox = path.name.removeprefix(f"{CNI_NETWORK}-").rsplit("-", 1)[0]
        (CNI_RESULTS / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for path in CONTAINER_LOGS.glob("*"):
        if path.is_symlink() and str(path.readlink()).startswith(str(directory)):
            path.unlink()
    plugins = KUBELET_DEFAULT / "device-plugins" / "kubelet.sock"
    if plugins.is_socket() and not _answers(plugins):
        plugins.unlink()
    for folder in (
        SHIM_STATE / "s",
        SHIM_STATE / "runc" / "k8s.io",
        SHIM_STATE / "runc",
        SHIM_STATE,
        CNI_RESULTS,
        CNI_STATE,
        CONTAINER_LOGS,
        KUBELET_DEFAULT / "device-plugins",
        KUBELET_DEFAULT,
    ):
        with contextlib.suppress(OSError):  # not empty, or not there: not ours
            folder.rmdir()


def _answers(path: Path) -> bool:
    """Whether a process still listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
