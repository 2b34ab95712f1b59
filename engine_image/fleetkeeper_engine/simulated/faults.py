"""What goes wrong in a simulated engine, and when."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping

from fleetkeeper_engine.devices.simulated import DEVICE_BYTES
from fleetkeeper_engine.simulated.engine import Engine
from fleetkeeper_engine.simulated.processor import EngineDeadError
from fleetkeeper_engine.simulated.settings import Fault
from fleetkeeper_engine.simulated.worker import Workers

logger = logging.getLogger("vllm.fleetkeeper")

Action = Callable[[], None]


def schedule_faults(faults: Iterable[Fault], actions: Mapping[str, Action]) -> None:
    """Let each fault happen at its time, counted from now."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        loop.call_later(fault.after_s, _happen, fault.kind, actions[fault.kind])


def desired_actions(engine: Engine, workers: Workers) -> dict[str, Action]:
    """Return what each kind of fault does."""

    def exhaust() -> None:
        sys.stderr.write(out_of_memory_text(os.getpid()))
        sys.stderr.flush()
        engine.die(EngineDeadError())

    return {
        "Freeze": engine.core.freeze,
        "Crash": _crash,
        "OutOfMemory": exhaust,
        "Fragmentation": workers.fragment,
    }


def out_of_memory_text(pid: int) -> str:
    """Return what vLLM and torch write when a step does not fit into the accelerator's memory."""
    total = DEVICE_BYTES / 1024**3
    prefix = f"(EngineCore pid={pid}) ERROR [core.py]"
    return (
        f"{prefix} EngineCore encountered a fatal error.\n"
        f"{prefix} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        f"total capacity of {total:.2f} GiB of which 1.21 GiB is free. (simulated)\n"
    )


def _crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def _happen(kind: str, action: Action) -> None:
    logger.warning("simulated fault %s", kind)
    action()
