"""The interface of a kind of accelerator. Each kind is a module beside this one.

vLLM's processes import this too, so it and the kinds stay free of heavy imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Accelerator(StrEnum):
    """The hardware that vLLM computes on."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a kind that decide how an engine is planned and watched."""

    own_memory: bool
    """Devices have memory of their own, of which vLLM gets a share. If not, weights, cache and
    processes share the pod's memory."""
    allocator_limit: bool
    """Each worker limits its allocator to the memory cap. A pod is not ready before."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One sample of the memory of a device, or of the pod if devices have no memory of their own."""

    used_bytes: int
    """In use by this pod's processes; by all processes if `own` is False."""
    total_bytes: int
    own: bool = True
    """True if it covers only this pod's processes."""

    @property
    def ratio(self) -> float:
        """Return used divided by total."""
        return self.used_bytes / self.total_bytes


class Devices(Protocol):
    """The devices of one pod, as the supervisor reads them."""

    def read(self) -> Sequence[DeviceMemory]:
        """Return the current memory of each device.

        Raises:
            OSError: if it cannot be measured.
        """
        ...


class Allocator(Protocol):
    """The allocator of one device in a worker's process."""

    @property
    def process_list(self) -> str:
        """As `DeviceKind.process_list`."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device, over all processes."""
        ...

    def reserved_bytes(self) -> int:
        """Return the bytes that this process's allocator has reserved."""
        ...

    def allocated_bytes(self) -> int:
        """Return the reserved bytes that are allocated."""
        ...

    def own_bytes(self) -> int | None:
        """Return the bytes of this process on the device; None if they are not known."""
        ...

    def set_fraction(self, fraction: float) -> None:
        """Limit the allocator to a fraction of the device's memory."""
        ...


class DeviceKind(Protocol):
    """One kind of accelerator."""

    @property
    def name(self) -> str:
        """Return the name of the kind, for people."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties of its devices."""
        ...

    @property
    def process_list(self) -> str:
        """Return the name of what lists a device's processes, for messages."""
        ...

    @property
    def out_of_memory(self) -> str:
        """Return a pattern of the output of an engine whose device, or pod, has no memory left."""
        ...

    def missing(self) -> str:
        """Return what this machine lacks for this kind; empty if it lacks nothing."""
        ...

    def open(self, environment: Mapping[str, str], ranks: int | None, pod_bytes: int) -> Devices:
        """Return the devices that vLLM uses.

        Args:
            environment: of vLLM.
            ranks: the number of devices; None for all that there are.
            pod_bytes: the memory that the pod may use.

        Raises:
            NoDevicesError: if there are too few.
        """
        ...

    def allocator(self, device: Any) -> Allocator | None:  # noqa: ANN401 - a device of torch
        """Return the allocator of a worker's device; None if it is of another kind or has no limit."""
        ...


class NoDevicesError(Exception):
    """There are too few devices. `str(error)` is one sentence for the user."""
