"""Memory in use, its peak, and the memory cap. The rule is pure; readers do the I/O."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from fleetkeeper_engine.nvml import DeviceReader
from fleetkeeper_engine.supervisor.memory.cgroup import Cgroup

SAMPLE_PERIOD_S = 0.1
OVER_CAP_PATIENCE_S = 10.0
"""New sequences stop after memory was above its cap for this long without a break."""

FRESH_S = 5.0
"""An older sample is not exported: absent differs from unchanged."""
FAMILY_EVERY = 10
"""Samples between two searches for the supervisor's descendants (outside a pod)."""

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One sample. Ratios are of the device (the fullest one) or of the pod's limit."""

    used_bytes: int
    total_bytes: int
    own: bool = True
    """True if it covers this pod's processes alone; False if it covers a whole device."""

    @property
    def ratio(self) -> float:
        """Return used divided by total."""
        return self.used_bytes / self.total_bytes


Reader = Callable[[], MemoryUse]


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The result of the samples so far."""

    cap_ratio: float
    used_ratio: float = 0.0
    used_bytes: int = 0
    peak_ratio: float = 0.0
    peak_bytes: int = 0
    above_since: float | None = None
    over_cap: bool = False
    own: bool = True
    """Whether the last sample covered this pod's processes alone."""
    sampled_at: float | None = None
    """When memory was last measured; None means never."""

    def is_fresh(self, now: float) -> bool:
        """Return whether the last sample is recent enough to export."""
        return self.sampled_at is not None and now - self.sampled_at <= FRESH_S


def decide_memory(state: MemoryState, use: MemoryUse, now: float) -> MemoryState:
    """Return the state after one more sample.

    `over_cap` is set after 10 s above the cap, until one sample is at the cap or below it.
    """
    above_since = state.above_since
    if use.ratio <= state.cap_ratio:
        above_since = None
    elif above_since is None:
        above_since = now
    # The use of a whole device, which includes other pods, is not this pod's peak.
    is_first_own = use.own and not state.own
    peak_ratio, peak_bytes = (0.0, 0) if is_first_own else (state.peak_ratio, state.peak_bytes)
    return replace(
        state,
        used_ratio=use.ratio,
        used_bytes=use.used_bytes,
        peak_ratio=max(peak_ratio, use.ratio),
        peak_bytes=max(peak_bytes, use.used_bytes),
        above_since=above_since,
        over_cap=above_since is not None and now - above_since >= OVER_CAP_PATIENCE_S,
        own=use.own,
        sampled_at=now,
    )


def pod_reader(devices: DeviceReader | None, limit_bytes: int) -> Reader:
    """Return the reader for this pod: of its devices, of its cgroup, or of this process and its descendants."""
    if devices is not None:
        return device_reader(devices)
    group = Cgroup.of_this_process()
    # Outside a pod the cgroup holds the whole session; in a pod it is the pod's own.
    if group is not None and (os.getpid() == 1 or group.limit_bytes() is not None):
        return cgroup_reader(group, limit_bytes)
    return process_reader(os.getpid(), limit_bytes)


def cgroup_reader(group: Cgroup, total_bytes: int) -> Reader:
    """Return a reader of the pod's cgroup."""

    def read() -> MemoryUse:
        return MemoryUse(group.used_bytes(), total_bytes)

    return read


def device_reader(devices: DeviceReader) -> Reader:
    """Return a reader of the fullest device."""

    def read() -> MemoryUse:
        fullest = max(devices.read(), key=lambda device: device.used_bytes / device.total_bytes)
        return MemoryUse(fullest.used_bytes, fullest.total_bytes, fullest.own)

    return read


def process_reader(root_pid: int, total_bytes: int, proc: Path = PROC) -> Reader:
    """Return a reader of a process and its descendants, for runs where the cgroup holds other programs too.

    Descendants are searched for every tenth sample, because vLLM has hundreds of threads to read.
    """
    family: list[int] = []
    samples = count()

    def read() -> MemoryUse:
        if next(samples) % FAMILY_EVERY == 0:
            family[:] = descendants(root_pid, proc)
        return MemoryUse(sum(_unshared_bytes(proc / str(pid)) for pid in family), total_bytes)

    return read


def descendants(root_pid: int, proc: Path = PROC) -> Iterable[int]:
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


def _unshared_bytes(process: Path) -> int:
    try:
        text = (process / "status").read_text()
    except OSError:
        return 0
    kilobytes = 0
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024
