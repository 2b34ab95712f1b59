"""A fixed share of the machine for the measured processes, so that its other load matters less."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""As kubelets set it. With a tenth of it, most of the quota is lost in the kernel's slices of 5 ms."""
WEIGHT_V1, WEIGHT_V2 = 102_400, 10_000
"""A hundred times that of an ordinary process or group."""


class CpuShare:
    """A CPU cgroup (v1 or v2) with a quota, and with priority up to this quota.

    Other processes on the machine take nothing of it, and it takes no more from them. As a context
    manager, it is removed at the end; its processes must have ended.
    """

    def __init__(self, cores: float | None) -> None:
        """Plan a share of so many cores; None means priority without a quota."""
        self._cores = cores
        self._v1 = (ROOT / "cpu").is_dir()
        parent = ROOT / "cpu" if self._v1 else ROOT
        self._directory = parent / f"fleetkeeper-benchmark-{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        """Create the group.

        Raises:
            OSError: this user cannot create it (it needs root).
        """
        self._directory.mkdir()
        for name, value in desired_files(self._cores, v1=self._v1).items():
            (self._directory / name).write_text(value)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the group; the calling process leaves it first."""
        with suppress(OSError):
            (self._directory.parent / "cgroup.procs").write_text(str(os.getpid()))
            self._directory.rmdir()

    def enter(self) -> None:
        """Move the calling process, with its threads, into the group."""
        (self._directory / "cgroup.procs").write_text(str(os.getpid()))


def desired_files(cores: float | None, *, v1: bool) -> dict[str, str]:
    """Return what to write into a group's files.

    >>> desired_files(0.5, v1=False)
    {'cpu.weight': '10000', 'cpu.max': '50000 100000'}
    """
    if v1:
        files = {"cpu.shares": str(WEIGHT_V1)}
        if cores is not None:
            files["cpu.cfs_period_us"] = str(PERIOD_US)
            files["cpu.cfs_quota_us"] = str(round(cores * PERIOD_US))
        return files
    files = {"cpu.weight": str(WEIGHT_V2)}
    if cores is not None:
        files["cpu.max"] = f"{round(cores * PERIOD_US)} {PERIOD_US}"
    return files
