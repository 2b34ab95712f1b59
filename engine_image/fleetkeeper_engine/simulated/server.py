"""The process of a simulated engine: the stages of a start, the API server, faults, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import uvicorn

from fleetkeeper_engine.devices.simulated import DEVICE_BYTES
from fleetkeeper_engine.in_vllm.usage.hooks import MODULE as OUTPUT_PROCESSOR
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.simulated import processor
from fleetkeeper_engine.simulated.engine import Engine
from fleetkeeper_engine.simulated.http.app import Api, with_middleware
from fleetkeeper_engine.simulated.options import Options
from fleetkeeper_engine.simulated.processor import EngineDeadError
from fleetkeeper_engine.simulated.simulation_settings import SimulationSettings, TimedFault
from fleetkeeper_engine.simulated.worker import Workers

logger = logging.getLogger("vllm.fleetkeeper")

Action = Callable[[], None]

BACKLOG = 2048
GRACE_S = 5
"""An engine that has died sends its errors within this time."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, begin: Callable[[], None]) -> None:
        super().__init__(config)
        self._begin = begin

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`: uvicorn would raise them again after it has stopped."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then begin."""
        await super().startup(sockets)
        self._begin()

    def stop(self) -> None:
        """Stop once the answers under way are sent."""
        self.should_exit = True

    def stop_now(self) -> None:
        """Stop at once: a drain has let every request finish before."""
        self.should_exit = self.force_exit = True


class SimulatedServer:
    """One simulated engine: its parts, and the stages of its start."""

    def __init__(self, options: Options, settings: SimulationSettings) -> None:
        self._settings = settings
        cap_ratio = VllmSettings.of_environment().cap_percent / 100
        self._workers = Workers(Region.of_environment(), cap_ratio)
        self._engine = Engine(options, settings)
        key = os.environ.get("VLLM_API_KEY")
        api = Api(self._engine, options.api_keys or ((key,) if key else ()))
        # The hooks that count usage find the output processor where vLLM has its own.
        sys.modules.setdefault(OUTPUT_PROCESSOR, processor)
        config = uvicorn.Config(
            with_middleware(api, options.middleware),
            host=options.host,
            port=options.port,
            http="httptools",
            interface="asgi3",
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        )
        self._server = _Server(config, self._begin)
        self._engine.on_death = self._server.stop
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> bool:
        """Serve until a signal or a fault ends the engine. Return False if a fault did."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._server.stop_now)
        settings = self._settings
        await asyncio.sleep(settings.weights_s)
        self._workers.report_load()
        await asyncio.sleep(settings.load_s)
        try:
            if not self._server.should_exit:
                await self._server.serve()
        finally:
            for task in self._tasks:
                task.cancel()
            await self._engine.stop()
        return self._engine.dead is None

    def _begin(self) -> None:
        self._tasks = [
            asyncio.create_task(self._warm_up(), name="warm-up"),
            asyncio.create_task(self._workers.run(), name="workers"),
        ]

    async def _warm_up(self) -> None:
        await asyncio.sleep(self._settings.warm_up_s)
        self._engine.start()
        actions = desired_actions(self._engine, self._workers)
        schedule_faults(self._settings.faults, actions)


def schedule_faults(faults: Iterable[TimedFault], actions: Mapping[str, Action]) -> None:
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
