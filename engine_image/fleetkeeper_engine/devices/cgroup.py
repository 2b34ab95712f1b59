"""Memory of the pod as the kernel counts it, cgroup v1 and v2.

Used = current - inactive_file - active_file. Page cache is reclaimed under pressure, so it does not
count. Shared memory (also /dev/shm) is not reclaimed, so it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""v1 writes a number near 2^63 if there is no limit."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The memory controller's files of one group."""

    directory: Path
    version: int

    @classmethod
    def of_this_process(cls, root: Path = ROOT, membership: Path = SELF) -> Cgroup | None:
        """Return the group of this process; None without a memory controller.

        Inside a container the path in /proc/self/cgroup may be the node's, while only the
        container's own group is mounted. In that case the mount's root is the group.
        """
        paths = _paths(membership)
        v1 = root / "memory"
        if (v1 / "memory.usage_in_bytes").exists():
            return cls(_nearest(v1, paths.get("memory", "/"), "memory.usage_in_bytes"), 1)
        directory = _nearest(root, paths.get("", "/"), "memory.current")
        if (directory / "memory.current").exists():
            return cls(directory, 2)
        return None

    def used_bytes(self) -> int:
        """Return the memory in use without page cache.

        Raises:
            OSError: if the group no longer exists.
        """
        if self.version == 1:
            current, cache = "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
        else:
            current, cache = "memory.current", ("inactive_file", "active_file")
        stat = self._stat("memory.stat")
        files = sum(stat.get(name, 0) for name in cache)
        return max(0, int((self.directory / current).read_text()) - files)

    def limit_bytes(self) -> int | None:
        """Return the lowest memory limit of this group and those above it; None without one."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limits = []
        for directory in (self.directory, *self.directory.parents):
            file = directory / name
            if not file.exists():
                break
            text = file.read_text().strip()
            if text != "max" and int(text) < _NO_LIMIT_BYTES:
                limits.append(int(text))
        return min(limits, default=None)

    def oom_kills(self) -> int:
        """Return the number of this group's processes that were OOM-killed; 0 if it is unknown."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            return self._stat(name).get("oom_kill", 0)
        except OSError:
            return 0

    def _stat(self, name: str) -> dict[str, int]:
        lines = (self.directory / name).read_text().splitlines()
        pairs = (line.split() for line in lines)
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_cpu_quota(root: Path = ROOT, membership: Path = SELF) -> float | None:
    """Return the CPUs that the group may use on average; None without a quota."""
    paths = _paths(membership)
    for controller in ("cpu", "cpu,cpuacct"):
        directory = _nearest(root / controller, paths.get("cpu", "/"), "cpu.cfs_quota_us")
        quota = directory / "cpu.cfs_quota_us"
        if quota.exists():
            allowed = int(quota.read_text())
            period = int((directory / "cpu.cfs_period_us").read_text())
            return allowed / period if allowed > 0 else None
    file = _nearest(root, paths.get("", "/"), "cpu.max") / "cpu.max"
    if not file.exists():
        return None
    fields = file.read_text().split()
    return None if fields[0] == "max" else int(fields[0]) / int(fields[1])


def _paths(membership: Path) -> dict[str, str]:
    """Return controller -> path, from /proc/self/cgroup. The unified hierarchy has the empty name."""
    found: dict[str, str] = {}
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _nearest(mount: Path, path: str, needed: str) -> Path:
    directory = mount / path.lstrip("/")
    return directory if (directory / needed).exists() else mount
