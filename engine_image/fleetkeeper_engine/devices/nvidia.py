"""NVIDIA devices: their memory through nvidia-ml-py, and torch's allocator on them.

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
from typing import Any, Protocol, cast

from fleetkeeper_engine.devices.interface import (
    Allocator,
    Capabilities,
    DeviceMemory,
    NoDevicesError,
)
from fleetkeeper_engine.devices.processes import is_descendant

DRIVER_LIBRARY = "libnvidia-ml.so.1"
PROCESS_LIST = "NVML"


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


class NvidiaDevices:
    """The devices that vLLM uses: the first `ranks` of CUDA_VISIBLE_DEVICES."""

    def __init__(
        self,
        nvml: Nvml,
        environment: Mapping[str, str],
        ranks: int | None,
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


@dataclass(frozen=True, slots=True)
class TorchAllocator:
    """Torch's allocator of one device. Torch is imported only in a worker whose device is set."""

    index: int

    @property
    def process_list(self) -> str:
        """Return the name of what lists a device's processes."""
        return PROCESS_LIST

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        import torch  # noqa: PLC0415 - only in a worker whose device is set

        free, total = torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def reserved_bytes(self) -> int:
        """Return the bytes that this process's allocator has reserved."""
        import torch  # noqa: PLC0415 - as above

        return int(torch.cuda.memory_reserved(self.index))

    def allocated_bytes(self) -> int:
        """Return the reserved bytes that are allocated."""
        import torch  # noqa: PLC0415 - as above

        return int(torch.cuda.memory_allocated(self.index))

    def own_bytes(self) -> int | None:
        """Return the bytes of this process on the device, as NVML lists them."""
        nvml = load_nvml()
        return None if nvml is None else process_bytes(nvml, os.environ, self.index, os.getpid())

    def set_fraction(self, fraction: float) -> None:
        """Limit the allocator to a fraction of the device's memory."""
        import torch  # noqa: PLC0415 - as above

        torch.cuda.set_per_process_memory_fraction(fraction, self.index)


class Nvidia:
    """NVIDIA devices as a kind of accelerator."""

    name = "nvidia"
    capabilities = Capabilities(own_memory=True, allocator_limit=True)
    process_list = PROCESS_LIST
    out_of_memory = r"CUDA out of memory|torch\.cuda\.OutOfMemoryError|CUDA error: out of memory"

    def missing(self) -> str:
        """Return what this machine lacks."""
        return "" if load_nvml() else "driver or nvidia-ml-py missing"

    def open(
        self, environment: Mapping[str, str], ranks: int | None, _pod_bytes: int
    ) -> NvidiaDevices:
        """Return the first `ranks` of the visible devices.

        Raises:
            NoDevicesError: if there are fewer, or no driver.
        """
        nvml = load_nvml()
        devices = NvidiaDevices(nvml, environment, ranks) if nvml else None
        if devices is None or (ranks is not None and len(devices.read()) < ranks):
            raise NoDevicesError(
                f"accelerator cuda needs {ranks} NVIDIA device(s) and NVML; check that the driver is mounted and the devices are requested"
            )
        return devices

    def allocator(self, device: Any) -> Allocator | None:  # noqa: ANN401 - a device of torch
        """Return torch's allocator of a CUDA device."""
        return TorchAllocator(int(device.index or 0)) if device.type == "cuda" else None
