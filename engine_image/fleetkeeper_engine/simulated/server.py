"""The process of a simulated engine: the stages of a start, the API server, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from fleetkeeper_engine.in_vllm.settings import VllmSettings
from fleetkeeper_engine.in_vllm.usage.hooks import MODULE as OUTPUT_PROCESSOR
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.simulated import processor
from fleetkeeper_engine.simulated.engine import Engine
from fleetkeeper_engine.simulated.faults import desired_actions, schedule_faults
from fleetkeeper_engine.simulated.http.app import Api, with_middleware
from fleetkeeper_engine.simulated.options import Options
from fleetkeeper_engine.simulated.settings import SimulationSettings
from fleetkeeper_engine.simulated.worker import Workers

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


class Simulation:
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
