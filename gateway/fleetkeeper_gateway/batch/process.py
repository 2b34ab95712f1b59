"""The process `batch`: files and batches of clients, and the lines that it sends to their services.

Any number of replicas may run on a store that they share. Each answers requests and runs lines; one of
them leads, which drives the life of all batches. It needs its store and Redis, and the API server at
the start. `serve` may be away: lines wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass

import structlog
import uvicorn
import uvloop
from pydantic import ValidationError

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.api import create_app
from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError
from fleetkeeper_gateway.batch.parts import (
    CLIENT_TIMEOUT_S,
    AllSettings,
    BatchParts,
    create_parts,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused
from fleetkeeper_gateway.http.admin import admin_application
from fleetkeeper_gateway.http.connection import connection_class
from fleetkeeper_gateway.server import CannotStart, Server, allow_open_files, listen, server_config
from fleetkeeper_gateway.services import WatchedServices
from fleetkeeper_gateway.telemetry.logs import configure_logs

log = structlog.get_logger(__name__)

_END_S = 10
"""Time that requests have to end after a SIGTERM."""
_SWEEP_S = 3600.0
_FIRST_SWEEP_S = 60.0
_CHECK_S = 2.0


@dataclass(slots=True)
class State:
    """What decides whether requests may come."""

    parts: BatchParts
    store: bool = False
    """Whether the store answered once."""
    draining: bool = False

    def told(self) -> dict[str, bool]:
        """Return it. Without Redis requests may come: files and batches are kept."""
        keys = self.parts.keys.synced
        return {
            "ready": self.store and keys and not self.draining,
            "draining": self.draining,
            "keys": keys,
            "store": self.store,
            "queue": self.parts.queue.up,
        }


def main() -> int:
    """Run until a signal ends it. Return the exit status."""
    try:
        settings = AllSettings()
        configure_logs(settings.batch.log_level, settings.batch.log_format)
        allow_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except ValidationError as error:
        sys.stderr.write(f"invalid settings (variables FLEETKEEPER_GATEWAY_*): {error}\n")
        return 2
    except CannotStart as error:
        sys.stderr.write(f"the batch process cannot start: {error}\n")
        return 1
    return 0


async def _run(settings: AllSettings) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        async with create_parts(settings) as parts:
            await _serve(settings.batch, parts, stopping)
    except ExceptionGroup as errors:
        refused = errors.subgroup(CannotStart)
        if refused is None:
            raise
        raise refused.exceptions[0] from errors
    log.info("batch process ended")


async def _serve(settings: BatchSettings, parts: BatchParts, stopping: asyncio.Event) -> None:
    state = State(parts)
    with (
        listen(settings.host, settings.batch_port) as requests_socket,
        listen(settings.host, settings.batch_admin_port) as admin_socket,
    ):
        requests = Server(_requests_config(parts))
        admin = Server(server_config(admin_application(state.told)))
        async with asyncio.TaskGroup() as tasks:
            admin_task = tasks.create_task(admin.serve(sockets=[admin_socket]))
            background = [
                tasks.create_task(run)
                for run in (parts.queue.run(), parts.keys.run(), *_services_run(parts.services))
            ]
            if await _store_answers(parts.storage, stopping):
                state.store = True
                work = [
                    tasks.create_task(parts.lifecycle.run()),
                    tasks.create_task(_sweep(parts)),
                ]
                worker_task = tasks.create_task(parts.worker.run())
                requests_task = tasks.create_task(requests.serve(sockets=[requests_socket]))
                log.info("batch process serves", requests=requests_socket.getsockname()[:2])
                # What lasts as long as the process is not looked at by each full collection.
                gc.collect()
                gc.freeze()
                await stopping.wait()
                state.draining = requests.should_exit = True
                parts.worker.stop()
                await worker_task
                await requests_task
                # While the queue is there: what leads gives its lease back.
                for task in work:
                    task.cancel()
                await asyncio.wait(work)
            for task in background:
                task.cancel()
            admin.should_exit = True
            await admin_task


def _services_run(services: WatchedServices | None) -> list[Coroutine[None, None, None]]:
    return [] if services is None else [services.run()]


async def _store_answers(storage: Storage, stopping: asyncio.Event) -> bool:
    """Wait until the store can be used. Return False if the process has to end before.

    Raises:
        CannotStart: if it is not one that can be used.
    """
    while not stopping.is_set():
        try:
            await storage.check()
        except StoreRefused as error:
            raise CannotStart(str(error)) from error
        except StorageError as error:
            metrics.STORE_FAILURES.labels("check").inc()
            log.warning("the store cannot be used yet", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await stopping.wait()
        else:
            return True
    return False


async def _sweep(parts: BatchParts) -> None:
    """Delete what has expired, every hour, in the process that leads."""
    await asyncio.sleep(_FIRST_SWEEP_S)
    while True:
        try:
            if await parts.queue.leads("sweep"):
                swept = await parts.storage.sweeper.sweep(parts.api.clock())
                log.info("store swept", files=swept.files, batches=swept.batches)
        except (QueueDown, StorageError) as error:
            log.warning("the store was not swept", error=str(error))
        except Exception:
            log.exception("the store was not swept")
        await asyncio.sleep(_SWEEP_S)


def _requests_config(parts: BatchParts) -> uvicorn.Config:
    config = server_config(create_app(parts.api))
    config.http = connection_class(CLIENT_TIMEOUT_S)
    config.timeout_graceful_shutdown = _END_S
    return config
