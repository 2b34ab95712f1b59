"""The kinds of accelerators that this engine knows."""

from __future__ import annotations

from typing import Any

from fleetkeeper_engine.devices.cpu import Cpu
from fleetkeeper_engine.devices.interface import Accelerator, Allocator, DeviceKind
from fleetkeeper_engine.devices.nvidia import Nvidia

KINDS: dict[Accelerator, DeviceKind] = {Accelerator.CUDA: Nvidia(), Accelerator.CPU: Cpu()}
"""The first that a machine has is its default."""


def allocator_of(device: Any) -> Allocator | None:  # noqa: ANN401 - a device of torch
    """Return the allocator of a worker's device; None if nothing limits it."""
    found = (kind.allocator(device) for kind in KINDS.values())
    return next((allocator for allocator in found if allocator is not None), None)


def out_of_memory(*, own_memory: bool) -> str:
    """Return the patterns of all kinds whose devices have, or do not have, memory of their own."""
    return "|".join(
        kind.out_of_memory for kind in KINDS.values() if kind.capabilities.own_memory is own_memory
    )
