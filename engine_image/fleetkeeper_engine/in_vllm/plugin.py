"""A vLLM general plugin: prepares every worker before its model is loaded.

It arms the memory cap where devices have an allocator for it, keeps requests with a seed from ending an engine on CPU (`seeds`),
and reports when the model is loaded.

vLLM runs general plugins in all its processes, before a worker's device is set, and swallows their
exceptions. So this module touches no device at load time. It wraps the worker's device
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
from dataclasses import replace
from typing import Any

from fleetkeeper_engine.devices.interface import Allocator
from fleetkeeper_engine.devices.kinds import allocator_of
from fleetkeeper_engine.in_vllm.seeds import keep_generators
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import CapBlock, LoadBlock
from fleetkeeper_engine.shm.region import Region

logger = logging.getLogger("vllm.fleetkeeper")

REPORT_PERIOD_S = 1.0
_MARK = "_fleetkeeper_cap"


def allocator_fraction(cap_ratio: float, total_bytes: int, non_torch_bytes: int) -> float:
    """Return the fraction of the device for torch's allocator: (cap - non-torch) / total; at least 0."""
    return min(1.0, max(0.0, cap_ratio - non_torch_bytes / total_bytes))


def arm(allocator: Allocator, index: int, cap_ratio: float) -> CapBlock:
    """Limit the allocator to the cap and return the values that were set.

    The cap stays unarmed if the memory outside the allocator fills it. Neighbors on a shared device
    are not part of that memory, unless it is not known which memory is this process's own.
    """
    (free, total), reserved = allocator.memory(), allocator.reserved_bytes()
    own_bytes = allocator.own_bytes()
    # A process that has less than torch reserved here has this one's number in another PID namespace.
    own = own_bytes is not None and own_bytes >= reserved
    used = own_bytes if own and own_bytes is not None else total - free
    non_torch = max(0, used - reserved)
    fraction = allocator_fraction(cap_ratio, total, non_torch)
    if fraction:
        allocator.set_fraction(fraction)
    return CapBlock(
        pid=os.getpid(),
        armed=fraction > 0.0,
        own=own,
        device=index,
        fraction=fraction,
        total_bytes=total,
        non_torch_bytes=non_torch,
        allocated_bytes=allocator.allocated_bytes(),
        reserved_bytes=reserved,
        written=time.monotonic(),
    )


def report_forever(region: Region, rank: int, allocator: Allocator, armed: CapBlock) -> None:
    """Write the allocator's figures once a second, for the fragmentation metric."""
    while True:
        time.sleep(REPORT_PERIOD_S)
        block = replace(
            armed,
            allocated_bytes=allocator.allocated_bytes(),
            reserved_bytes=allocator.reserved_bytes(),
            written=time.monotonic(),
        )
        region.write_cap(rank, block)


def arm_worker(
    worker: Any,  # noqa: ANN401 - a vLLM worker
    find: Callable[[Any], Allocator | None] = allocator_of,
) -> None:
    """Arm the cap of a worker whose device is set. Without a limit for its allocator, plan and watch keep it."""
    # vLLM passes a wrapper around the actual worker.
    worker = getattr(worker, "worker", None) or worker
    device = getattr(worker, "device", None)
    allocator = None if device is None else find(device)
    if device is None or allocator is None:
        return
    region = Region.of_environment()
    if region is None:
        logger.error("the memory cap is not armed: shared memory is missing")
        return
    rank, index = int(worker.rank), int(device.index or 0)
    armed = arm(allocator, index, VllmSettings.of_environment().cap_percent / 100)
    region.write_cap(rank, armed)
    if not armed.armed:
        logger.error("the memory cap is not armed: %s", armed.refusal(allocator.process_list))
        return
    logger.info("memory cap armed rank=%d fraction=%.3f", rank, armed.fraction)
    threading.Thread(
        target=report_forever,
        args=(region, rank, allocator, armed),
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
