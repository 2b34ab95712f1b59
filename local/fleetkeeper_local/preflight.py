"""What a machine must have before a node is started on it; each lack is one clear line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from fleetkeeper_local.errors import LocalError
from fleetkeeper_local.settings import NodeSettings
from fleetkeeper_local.shell import attempt

GIB = 1024**3
DISK_GIB = 10
"""The kubelet evicts pods when the disk fills; with less than this an engine image does not fit."""
MEMORY_GIB = 2
"""The components take 1 GiB; less than twice that leaves nothing for a pod."""

INSTEAD = (
    "What works here: `fleetkeeper local up --control-plane-only` (no root, no containers), "
    "or `--kubeconfig FILE` of a cluster that you have (kind, minikube, a remote one)."
)


def check_machine(settings: NodeSettings) -> None:
    """Returns when this user and this machine's space allow a node.

    Raises:
        LocalError: it names everything that is missing, and what works instead.
    """
    _refuse([*_lacking_rights(), *_lacking_space(settings.directory)])


def check_kernel() -> None:
    """Returns when the kernel (or the container we are in) allows what a node needs.

    Raises:
        LocalError: it names everything that is missing, and what works instead.
    """
    _refuse(_lacking_kernel())


def _refuse(lacks: list[str]) -> None:
    if lacks:
        listed = "\n".join(f"  - {lack}" for lack in lacks)
        raise LocalError(f"a node cannot run on this machine:\n{listed}\n{INSTEAD}")


def _lacking_rights() -> list[str]:
    if os.uname().sysname != "Linux":
        return [f"Linux is needed, this is {os.uname().sysname}"]
    if os.geteuid() != 0:
        return ["root is needed (containers, mounts, network interfaces)"]
    return []


def _lacking_kernel() -> list[str]:
    """Tries what cannot be read off reliably: making a bridge, and a packet filter table."""
    lacks = []
    known = Path("/proc/filesystems").read_text().split()
    if "overlay" not in known and attempt("modprobe", "overlay").returncode:
        lacks.append("the kernel has no overlay file system")
    if not any(Path("/sys/fs/cgroup").glob("*")):
        lacks.append("no cgroup hierarchy is mounted at /sys/fs/cgroup")
    probe = f"fkprobe{os.getpid() % 100000}"
    if attempt("ip", "link", "add", probe, "type", "bridge").returncode:
        lacks.append("the kernel (or this container) lets us make no bridge interface")
    else:
        attempt("ip", "link", "delete", probe)
    if attempt("nft", "add", "table", "ip", probe).returncode:
        lacks.append("the kernel (or this container) lets us make no nftables table")
    else:
        attempt("nft", "delete", "table", "ip", probe)
    return lacks


def _lacking_space(directory: Path) -> list[str]:
    lacks = []
    folder = directory
    while not folder.exists():
        folder = folder.parent
    disk_gib = shutil.disk_usage(folder).free / GIB
    if disk_gib < DISK_GIB:
        lacks.append(
            f"{DISK_GIB} GiB must be free under {folder}, {disk_gib:.1f} GiB are "
            "(another folder: --dir)"
        )
    memory_gib = psutil.virtual_memory().available / GIB
    if memory_gib < MEMORY_GIB:
        lacks.append(f"{MEMORY_GIB} GiB of memory must be available, {memory_gib:.1f} GiB are")
    return lacks
