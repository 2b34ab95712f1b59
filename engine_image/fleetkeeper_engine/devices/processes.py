"""Processes of this pod, by /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def descendants(root_pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield a process and all its descendants; those that end in the meantime are left out."""
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            for task in (proc / str(pid) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue


def is_descendant(pid: int, root: int | None = None, proc: Path = PROC) -> bool:
    """Return whether a process descends from `root` (default: this process). An ended one does not."""
    root = os.getpid() if root is None else root
    # A container's pid 1 uses no device, so a listed pid 1 is the node's.
    above = _parent(pid, proc) if pid != root else None
    while above is not None and above > 1 and above != root:
        above = _parent(above, proc)
    return above == root


def unshared_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process without pages of files; 0 if it has ended."""
    try:
        text = (proc / str(pid) / "status").read_text()
    except OSError:
        return 0
    kilobytes = 0
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def _parent(pid: int, proc: Path) -> int | None:
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])
