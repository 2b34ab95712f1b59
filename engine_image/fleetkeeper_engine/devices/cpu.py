"""The CPU: weights, cache and processes share the memory of the pod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from fleetkeeper_engine.devices.cgroup import Cgroup
from fleetkeeper_engine.devices.interface import Allocator, Capabilities, DeviceMemory
from fleetkeeper_engine.devices.processes import PROC, descendants, unshared_bytes

FAMILY_EVERY = 10
"""Samples between two searches for the supervisor's descendants (outside a pod)."""


class PodMemory:
    """The memory of this pod: of its cgroup, or of a process and its descendants.

    Descendants are searched for every tenth sample, because vLLM has hundreds of threads to read.
    """

    def __init__(
        self, total_bytes: int, group: Cgroup | None, root_pid: int, proc: Path = PROC
    ) -> None:
        self._total_bytes = total_bytes
        self._group = group
        self._root_pid = root_pid
        self._proc = proc
        self._samples = count()
        self._family: list[int] = []

    @classmethod
    def of_this_pod(cls, total_bytes: int) -> PodMemory:
        """Return the reader for this process."""
        group = Cgroup.of_this_process()
        # Outside a pod the cgroup holds the whole session; in a pod it is the pod's own.
        is_own = group is not None and (os.getpid() == 1 or group.limit_bytes() is not None)
        return cls(total_bytes, group if is_own else None, os.getpid())

    def read(self) -> list[DeviceMemory]:
        """Return the pod's memory, as that of one device.

        Raises:
            OSError: if the cgroup no longer exists.
        """
        used = self._family_bytes() if self._group is None else self._group.used_bytes()
        return [DeviceMemory(used, self._total_bytes)]

    def _family_bytes(self) -> int:
        if next(self._samples) % FAMILY_EVERY == 0:
            self._family = list(descendants(self._root_pid, self._proc))
        return sum(unshared_bytes(pid, self._proc) for pid in self._family)


class Cpu:
    """The CPU as a kind of accelerator. Plan and measurement keep its cap, no allocator does."""

    name = "cpu"
    capabilities = Capabilities(own_memory=False, allocator_limit=False)
    process_list = "the kernel"
    out_of_memory = (
        r"DefaultCPUAllocator: can't allocate memory|not enough memory: you tried to allocate|"
        r"Available memory on node .* is less than (requested|desired)"
    )

    def missing(self) -> str:
        """Return an empty text: every machine has one."""
        return ""

    def open(
        self, _environment: Mapping[str, str], _ranks: int | None, pod_bytes: int
    ) -> PodMemory:
        """Return the memory of the pod."""
        return PodMemory.of_this_pod(pod_bytes)

    def allocator(self, _device: Any) -> Allocator | None:  # noqa: ANN401 - a device of torch
        """Return None: nothing limits an allocator on CPU."""
        return None
