"""Memory of the pod's NVIDIA devices, by nvidia-ml-py.

Whole devices (and MIG slices) belong to one pod, so what is used on them is used by the pod: NVML
reports processes by the node's process ids, which a container cannot map to its own.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

DRIVER_LIBRARY = "libnvidia-ml.so.1"


class Nvml(Protocol):
    """What is used of the module `pynvml`."""

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Connects to the driver."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        """Devices that this container sees."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """A device."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """A device or a MIG slice."""

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802, ANN401 - NVML's name and opaque handle
        """total, free, used."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device."""

    used_bytes: int
    total_bytes: int


def load_nvml() -> Nvml | None:
    """The library, connected; None where there is no driver or no nvidia-ml-py."""
    try:
        # pynvml takes 5 MB; without the driver's library it is of no use.
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
    """Reads the devices that vLLM uses: the first `ranks` of CUDA_VISIBLE_DEVICES."""

    def __init__(self, nvml: Nvml, environment: Mapping[str, str], ranks: int) -> None:
        self._nvml = nvml
        self._error: type[Exception] = getattr(nvml, "NVMLError", OSError)
        self._handles = [nvml_handle(nvml, name) for name in _visible(nvml, environment)[:ranks]]

    def read(self) -> list[DeviceMemory]:
        """Memory of each device now. Total is what the driver reports; used includes every process.

        Raises:
            OSError: when the driver does not answer.
        """
        try:
            infos = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        except self._error as error:
            raise OSError(f"NVML: {error}") from error
        return [DeviceMemory(int(info.used), int(info.total)) for info in infos]


def nvml_handle(nvml: Nvml, name: str) -> Any:  # noqa: ANN401 - an opaque handle of NVML
    """The handle of a device named by index or UUID, as CUDA_VISIBLE_DEVICES names it."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _visible(nvml: Nvml, environment: Mapping[str, str]) -> Sequence[str]:
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    if named:
        return [word.strip() for word in named.split(",")]
    return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
