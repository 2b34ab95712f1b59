"""Processor seconds of a run of the tests, with everything that it starts."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
OWN: Final = Path("/proc/self/cgroup")
STAT: Final = Path("/proc/stat")
NOT_BUSY: Final = (3, 4)
"""Fields of /proc/stat: idle and iowait."""
COUNTED: Final = 8
"""Fields of /proc/stat up to steal; guests are part of user."""


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds, user and system."""

    own_s: float
    """Processor seconds of the processes of this run."""
    source: str
    machine_s: float
    """Processor seconds of the whole machine in that time: containers of a node are in cgroups of their own."""


class ProcessorTime:
    """The processor seconds since its creation.

    In a cgroup (v2) of its own, the process also counts daemons without a waiting parent. Where it cannot
    create a cgroup, it counts itself and the children that were waited for.
    """

    def __init__(self) -> None:
        self._machine_s = _machine_s()
        self._self_s = _rusage_s()
        self._home: Path | None = None
        self._group: Path | None = None
        self._why = ""
        try:
            self._home = _own_cgroup()
            group = self._home / f"fleetkeeper-tests-{os.getpid()}"
            group.mkdir()
            self._group = group
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except (OSError, LookupError) as error:
            self._why = f"no cgroup: {error}"
            self._leave()

    def used(self) -> Used:
        """Return what was used until now."""
        machine_s = _machine_s() - self._machine_s
        if self._group is None:
            return Used(_rusage_s() - self._self_s, f"children waited for; {self._why}", machine_s)
        fields = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return Used(int(fields["usage_usec"]) / 1e6, "a cgroup", machine_s)

    def close(self) -> str:
        """Return to the cgroup from before; return what is left of the run, if anything."""
        try:
            left = self._leave()
        except OSError as error:
            return f"its cgroup stays: {error}"
        return f"{left} processes outlive it" if left else ""

    def _leave(self) -> int:
        """Move all to the cgroup from before and remove the own one; return how many others there were."""
        group, self._group = self._group, None
        if group is None or self._home is None:
            return 0
        processes = (group / "cgroup.procs").read_text().split()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                (self._home / "cgroup.procs").write_text(process)
        group.rmdir()
        return len(set(processes) - {str(os.getpid())})


def _own_cgroup() -> Path:
    """Return the folder of this process in cgroup v2; raise LookupError if it is not mounted."""
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    found = [fields for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    own = [line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::")]
    if not found or not own:
        raise LookupError("cgroup v2 is not mounted")
    root, mounted = found[0][3], found[0][4]
    inside = own[0] if root == "/" else own[0].removeprefix(root)
    return Path(mounted) / inside.lstrip("/")


def _rusage_s() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _machine_s() -> float:
    ticks = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[1 : COUNTED + 1]]
    busy = sum(ticks) - sum(ticks[field] for field in NOT_BUSY)
    return busy / os.sysconf("SC_CLK_TCK")
