"""Memory of the pod's NVIDIA devices, through nvidia-ml-py.

A device may be shared (time slicing, MPS), so only the memory of this pod's processes counts. NVML
does not always know which those are: in a container the driver may hide process ids or omit their
memory. In that case the whole device counts, and the result is marked so.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

DRIVER_LIBRARY = "libnvidia-ml.so.1"


class Nvml(Protocol):
    """The functions of the module `pynvml` that are used."""

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Connect to the driver."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        """Return the number of devices that this container sees."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """Return a device."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """Return a device or a MIG slice."""

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """Return total, free and used."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """Return processes with a compute context: pid, and usedGpuMemory or None if it is not available."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device."""

    used_bytes: int
    """In use by this pod's processes; by all processes if `own` is False."""
    total_bytes: int
    own: bool
    """Whether NVML listed this pod's processes."""


def load_nvml() -> Nvml | None:
    """Return the library, connected; None without a driver or nvidia-ml-py."""
    try:
        # pynvml takes 5 MB and is useless without the driver's library.
        ctypes.CDLL(DRIVER_LIBRARY)
        library = importlib.import_module("pynvml")
    except (ImportError, OSError):
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return cast("Nvml", library)


class DeviceReader:
    """Reader of the devices that vLLM uses: the first `ranks` of CUDA_VISIBLE_DEVICES."""

    def __init__(
        self,
        nvml: Nvml,
        environment: Mapping[str, str],
        ranks: int,
        is_own: Callable[[int], bool] | None = None,
    ) -> None:
        self._nvml = nvml
        self._error: type[Exception] = getattr(nvml, "NVMLError", OSError)
        self._handles = [nvml_handle(nvml, name) for name in _visible(nvml, environment)[:ranks]]
        self._is_own = is_own or is_descendant
        self._seen = [False] * len(self._handles)

    def read(self) -> list[DeviceMemory]:
        """Return the current memory of each device. The driver reports the total.

        Raises:
            OSError: if the driver does not answer.
        """
        try:
            return [self._read(number, handle) for number, handle in enumerate(self._handles)]
        except self._error as error:
            raise OSError(f"NVML: {error}") from error

    def _read(self, number: int, handle: object) -> DeviceMemory:
        info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        own = self._own_bytes(number, handle)
        used = int(info.used) if own is None else own
        return DeviceMemory(used, int(info.total), own is not None)

    def _own_bytes(self, number: int, handle: object) -> int | None:
        """Return the memory of this pod's processes; None if NVML does not know it."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._error:
            # Not supported on this device or by this driver; the device's total memory still is.
            return None
        # A process may be listed more than once (for each compute instance).
        own = [process for process in processes if self._is_own(int(process.pid))]
        if any(process.usedGpuMemory is None for process in own):
            return None
        self._seen[number] |= bool(own)
        # If none of our processes is listed, they hold nothing, provided that one was ever listed. Otherwise
        # they may be hidden.
        return sum(int(process.usedGpuMemory) for process in own) if self._seen[number] else None


def process_bytes(nvml: Nvml, environment: Mapping[str, str], index: int, pid: int) -> int | None:
    """Return the memory of one process on a device by its CUDA index; None if NVML does not know it.

    In a container, a driver lists either the container's own process IDs, or those of the node.
    """
    try:
        handle = nvml_handle(nvml, _visible(nvml, environment)[index])
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (IndexError, getattr(nvml, "NVMLError", OSError)):
        # No such device by this name, or the device does not list its processes.
        return None
    used = [process.usedGpuMemory for process in processes if int(process.pid) == pid]
    return sum(map(int, used)) if used and None not in used else None


def is_descendant(pid: int, root: int | None = None, proc: Path = Path("/proc")) -> bool:
    """Return whether a process descends from `root` (default: this process). An ended one does not."""
    root = os.getpid() if root is None else root
    # A container's pid 1 has no CUDA context, so a listed pid 1 is the node's.
    above = _parent(pid, proc) if pid != root else None
    while above is not None and above > 1 and above != root:
        above = _parent(above, proc)
    return above == root


def _parent(pid: int, proc: Path) -> int | None:
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def nvml_handle(nvml: Nvml, name: str) -> Any:  # noqa: ANN401 - an opaque handle of NVML
    """Return the handle of a device named by index or UUID, as in CUDA_VISIBLE_DEVICES."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _visible(nvml: Nvml, environment: Mapping[str, str]) -> Sequence[str]:
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    if named:
        return [word.strip() for word in named.split(",")]
    return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
