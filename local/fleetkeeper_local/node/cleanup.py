"""Removal of a node's traces in the kernel: containers, mounts, namespaces, rules, cgroups."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil

from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.node import hostnet
from fleetkeeper_local.node.flags import CNI_NETWORK
from fleetkeeper_local.node.settings import NodeSettings

CGROUPS = Path("/sys/fs/cgroup")
CNI_STATE = Path("/var/lib/cni")
CNI_RESULTS = CNI_STATE / "results"
CONTAINER_LOGS = Path("/var/log/containers")
KUBELET_DEFAULT = Path("/var/lib/kubelet")
"""The kubelet creates a device-plugins directory here, also with another root directory."""
SHIM_STATE = Path("/run/containerd")
END_TIMEOUT_S = 10.0


def remove_containers(settings: NodeSettings) -> None:
    """End every container through containerd; containerd must still run."""
    ctr = (program_path("ctr"), "--address", settings.containerd_socket, "--namespace", "k8s.io")
    tasks = attempt(*ctr, "task", "list", "--quiet").stdout.split()
    if tasks:
        attempt(*ctr, "task", "rm", "--force", *tasks)
    containers = attempt(*ctr, "container", "list", "--quiet").stdout.split()
    if containers:
        attempt(*ctr, "container", "rm", *containers)


def end_shims(settings: NodeSettings) -> None:
    """Kill the shims of this node's containers, and their children.

    Needed when containerd is gone. A shim is identified by the socket among its arguments.
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
    _remove_shim_files(settings)


def _remove_shim_files(settings: NodeSettings) -> None:
    """Remove what killed shims leave in /run/containerd: runc's state and their sockets.

    A containerd that starts again removes the bundles of shims that have ended, but neither of these. So
    runc's note of the bundle says whose state it is, and a socket goes if no process listens on it.
    """
    for state in (SHIM_STATE / "runc" / "k8s.io").glob("*/state.json"):
        # Another containerd has its containers here, too, and their state may have another form.
        labels = json.loads(state.read_text()).get("config", {}).get("labels") or ()
        if any(label.startswith(f"bundle={settings.directory}/") for label in labels):
            shutil.rmtree(state.parent)
    for path in (SHIM_STATE / "s").glob("*"):
        if not _answers(path):
            path.unlink(missing_ok=True)


def remove_kernel_state(settings: NodeSettings) -> None:
    """Remove mounts, network namespaces, interfaces, rules, cgroups and files in system paths."""
    namespaces = hostnet.namespaces_on(CNI_RESULTS, CNI_NETWORK)
    unmount_below(settings.directory)
    hostnet.remove_namespaces(namespaces)
    hostnet.remove_bridge(settings.bridge)
    hostnet.remove_proxy_rules()
    remove_cgroups()
    _remove_strays(settings.directory)


def unmount_below(directory: Path) -> None:
    """Unmount everything that is mounted on or below a directory, deepest first."""
    for point in reversed(mounts_below(directory)):
        if attempt("umount", point).returncode:
            attempt("umount", "--lazy", point)


def mounts_below(directory: Path) -> list[str]:
    """Return the mount points on or below a directory, parents before their children."""
    root = str(directory.resolve())
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Field 5 is the mount point; a space in it is written \\040 (proc_pid_mountinfo(5)).
        point = line.split()[4].encode().decode("unicode_escape")
        if point == root or point.startswith(root + "/"):
            points.append(point)
    return sorted(points)


def remove_cgroups() -> None:
    """Remove the `kubepods` cgroups of every hierarchy; wait for their last processes to end."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (roots := kubepods_cgroups()) and time.monotonic() < deadline:
        for root in roots:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # busy until its last process is reaped
                    Path(folder).rmdir()
        time.sleep(0.05)


def kubepods_cgroups() -> list[Path]:
    """Return the kubelet's cgroups, in cgroup v1 and v2."""
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
        with contextlib.suppress(OSError):  # not empty or absent: not ours
            folder.rmdir()


def _answers(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True
