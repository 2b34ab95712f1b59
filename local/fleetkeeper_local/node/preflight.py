"""Requirements of a node on this machine; each unmet one is one clear line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.node.settings import NodeSettings

GIB = 1024**3
DISK_GIB = 10
"""The kubelet evicts pods when the disk is full; an engine image does not fit in less than this."""
MEMORY_GIB = 2
"""The components use 1 GiB; less than twice that leaves nothing for pods."""

INSTEAD = (
    "Alternatives: `fleetkeeper local up --control-plane-only` (no root, no containers), "
    "or `--kubeconfig FILE` of an existing cluster (kind, minikube, a remote one)."
)


def check_machine(settings: NodeSettings) -> None:
    """Return if this user and this machine's free space allow a node.

    Raises:
        LocalError: lists everything that is missing, and the alternatives.
    """
    _refuse([*_lacking_rights(), *_lacking_space(settings.directory)])


def check_kernel() -> None:
    """Return if the kernel (or the surrounding container) allows what a node needs.

    Raises:
        LocalError: lists everything that is missing, and the alternatives.
    """
    _refuse(_lacking_kernel())


def _refuse(lacks: list[str]) -> None:
    if lacks:
        listed = "\n".join(f"  - {lack}" for lack in lacks)
        raise LocalError(f"a node cannot run on this machine:\n{listed}\n{INSTEAD}")


def _lacking_rights() -> list[str]:
    if os.uname().sysname != "Linux":
        return [f"Linux is needed, this machine runs {os.uname().sysname}"]
    if os.geteuid() != 0:
        return ["root is needed (containers, mounts, network interfaces)"]
    return []


def _lacking_kernel() -> list[str]:
    """Try what cannot be looked up reliably: creating a bridge and a packet filter table."""
    lacks = []
    known = Path("/proc/filesystems").read_text().split()
    if "overlay" not in known and attempt("modprobe", "overlay").returncode:
        lacks.append("the kernel does not support the overlay file system")
    if not any(Path("/sys/fs/cgroup").glob("*")):
        lacks.append("no cgroup hierarchy is mounted at /sys/fs/cgroup")
    probe = f"fkprobe{os.getpid() % 100000}"
    if attempt("ip", "link", "add", probe, "type", "bridge").returncode:
        lacks.append("the kernel (or this container) does not allow bridge interfaces")
    else:
        attempt("ip", "link", "delete", probe)
    if attempt("nft", "add", "table", "ip", probe).returncode:
        lacks.append("the kernel (or this container) does not allow nftables tables")
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
            f"{DISK_GIB} GiB must be free in {folder}, found {disk_gib:.1f} GiB "
            "(choose another directory with --dir)"
        )
    memory_gib = psutil.virtual_memory().available / GIB
    if memory_gib < MEMORY_GIB:
        lacks.append(f"{MEMORY_GIB} GiB of memory must be available, found {memory_gib:.1f} GiB")
    return lacks
