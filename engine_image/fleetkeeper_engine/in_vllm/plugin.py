"""A vLLM general plugin: prepares every worker before its model is loaded.

It arms the memory cap on CUDA, keeps requests with a seed from ending an engine on CPU (`seeds`),
and reports when the model is loaded.

vLLM runs general plugins in all its processes, before a worker's device is set, and swallows their
exceptions. So this module does not touch CUDA at load time. It wraps the worker's device
initialization: once the device is set, the allocator is limited to the cap and "armed" is written
to shared memory. A worker in which that fails stays unarmed, and its pod never becomes ready.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fleetkeeper_engine.in_vllm.seeds import keep_generators
from fleetkeeper_engine.in_vllm.settings import VllmSettings
from fleetkeeper_engine.nvml import load_nvml, process_bytes
from fleetkeeper_engine.shm.layout import CapBlock, LoadBlock
from fleetkeeper_engine.shm.region import Region

logger = logging.getLogger("vllm.fleetkeeper")

REPORT_PERIOD_S = 1.0
_MARK = "_fleetkeeper_cap"


class Device(Protocol):
    """The part of torch that is used for one device."""

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


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A CUDA device through torch, which is imported only once the device is set."""

    index: int

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


def allocator_fraction(cap_ratio: float, total_bytes: int, non_torch_bytes: int) -> float:
    """Return the fraction of the device for torch's allocator: (cap - non-torch) / total; at least 0."""
    return min(1.0, max(0.0, cap_ratio - non_torch_bytes / total_bytes))


def arm(device: Device, index: int, cap_ratio: float) -> CapBlock:
    """Limit the allocator to the cap and return the values that were set.

    The cap stays unarmed if the memory outside the allocator fills it. Neighbors on a shared device
    are not part of that memory, unless it is not known which memory is this process's own.
    """
    (free, total), reserved = device.memory(), device.reserved_bytes()
    own_bytes = device.own_bytes()
    # A process that has less than torch reserved here has this one's number in another PID namespace.
    own = own_bytes is not None and own_bytes >= reserved
    used = own_bytes if own and own_bytes is not None else total - free
    non_torch = max(0, used - reserved)
    fraction = allocator_fraction(cap_ratio, total, non_torch)
    if fraction:
        device.set_fraction(fraction)
    return CapBlock(
        pid=os.getpid(),
        armed=fraction > 0.0,
        own=own,
        device=index,
        fraction=fraction,
        total_bytes=total,
        non_torch_bytes=non_torch,
        allocated_bytes=device.allocated_bytes(),
        reserved_bytes=reserved,
        written=time.monotonic(),
    )


def report_forever(region: Region, rank: int, device: Device, armed: CapBlock) -> None:
    """Write the allocator's figures once a second, for the fragmentation metric."""
    while True:
        time.sleep(REPORT_PERIOD_S)
        block = replace(
            armed,
            allocated_bytes=device.allocated_bytes(),
            reserved_bytes=device.reserved_bytes(),
            written=time.monotonic(),
        )
        region.write_cap(rank, block)


def arm_worker(
    worker: Any,  # noqa: ANN401 - a vLLM worker
    make_device: Callable[[int], Device] = TorchDevice,
) -> None:
    """Arm the cap of a worker whose device is set. Do nothing on CPU, where plan and watch enforce it."""
    # vLLM passes a wrapper around the actual worker.
    worker = getattr(worker, "worker", None) or worker
    device = getattr(worker, "device", None)
    if device is None or device.type != "cuda":
        return
    region = Region.of_environment()
    if region is None:
        logger.error("the memory cap is not armed: shared memory is missing")
        return
    rank, index = int(worker.rank), int(device.index or 0)
    torch_device = make_device(index)
    armed = arm(torch_device, index, VllmSettings.of_environment().cap_percent / 100)
    region.write_cap(rank, armed)
    if not armed.armed:
        logger.error("the memory cap is not armed: %s", armed.refusal)
        return
    logger.info("memory cap armed rank=%d fraction=%.3f", rank, armed.fraction)
    threading.Thread(
        target=report_forever,
        args=(region, rank, torch_device, armed),
        name="fleetkeeper-cap",
        daemon=True,
    ).start()


def report_load(worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
    """Write the time to shared memory when the worker's `load_model` has returned."""
    worker = getattr(worker, "worker", None) or worker
    region, load_model = Region.of_environment(), worker.load_model
    if region is None:
        return
    rank = int(worker.rank)

    @functools.wraps(load_model)
    def reported(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        result = load_model(*args, **kwargs)
        region.write_load(rank, LoadBlock(time.monotonic()))
        return result

    worker.load_model = reported


def prepare_worker(worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
    """Prepare a worker whose device is set. A failure of one part does not touch the others."""
    try:
        report_load(worker)
    except Exception:
        # The start is only reported with less detail.
        logger.exception("the time of the load is not reported")
    try:
        keep_generators(worker)
    except Exception:
        # vLLM's interface is not public. Other requests are served as before.
        logger.exception("requests with a seed are left to vLLM as it is")
    arm_worker(worker)


def wrap(worker_class: type[Any], action: Callable[[Any], None] = prepare_worker) -> None:
    """Call `action` after every `init_device` of a worker class. A second call changes nothing."""
    original = worker_class.init_device
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        result = original(self, *args, **kwargs)
        try:
            action(self)
        except Exception:
            # Shared memory shows the cap as unarmed, and the pod stays unready for that reason.
            logger.exception("arming the memory cap failed")
        return result

    setattr(init_device, _MARK, True)
    worker_class.init_device = init_device


def register() -> None:
    """Wrap the class through which vLLM starts any worker (entry point `vllm.general_plugins`)."""
    if Region.of_environment() is None:
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - only inside vLLM

    wrap(WorkerWrapperBase)
