"""The process `batch`: serves clients' files and batches, and sends the lines to their services.

Any number of replicas may share a store. Each serves requests and runs lines, in worker processes that it
starts. One of them is the leader, which moves all batches from state to state. A replica needs its store
and Redis, and the API server at the start. While `serve` is away, lines wait.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from dataclasses import asdict

import structlog
import uvicorn
import uvloop
from prometheus_client import generate_latest
from pydantic import ValidationError

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.api import create_app
from fleetkeeper_gateway.batch.going_on import happens_within, noted
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.parts import (
    CLIENT_TIMEOUT_S,
    AllSettings,
    BatchParts,
    create_parts,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused
from fleetkeeper_gateway.http.admin import admin_application
from fleetkeeper_gateway.http.connections.connection import connection_class
from fleetkeeper_gateway.server import CannotStart, Server, allow_open_files, listen, server_config
from fleetkeeper_gateway.telemetry.logs import configure_logs

log = structlog.get_logger(__name__)

_END_S = 10
"""Time for requests to end after a SIGTERM."""
_SWEEP_S = 3600.0
_FIRST_SWEEP_S = 60.0
_CHECK_S = 2.0


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
    has_store = is_draining = False

    def state() -> dict[str, bool]:
        # Requests are accepted without Redis: files and batches are in the store.
        keys = parts.keys.synced
        return {
            "ready": has_store and keys and not is_draining,
            "draining": is_draining,
            "keys": keys,
            "store": has_store,
            "queue": parts.queue.up,
        }

    async def page() -> bytes:
        return generate_latest(parts.shown)

    with (
        listen(settings.host, settings.batch_port) as requests_socket,
        listen(settings.host, settings.batch_admin_port) as admin_socket,
    ):
        requests = Server(_requests_config(parts))
        admin = Server(server_config(admin_application(state, page)))
        async with asyncio.TaskGroup() as tasks:
            admin_task = tasks.create_task(admin.serve(sockets=[admin_socket]))
            background = [tasks.create_task(run) for run in (parts.queue.run(), parts.keys.run())]
            if parts.services is not None:
                background.append(tasks.create_task(parts.services.run()))
            if await _store_answers(parts.storage, stopping):
                has_store = True
                work = [
                    tasks.create_task(parts.lifecycle.run()),
                    tasks.create_task(_sweep(parts)),
                ]
                pool_task = tasks.create_task(parts.pool.run())
                requests_task = tasks.create_task(requests.serve(sockets=[requests_socket]))
                log.info("batch process serves", requests=requests_socket.getsockname()[:2])
                # Objects that live as long as the process are excluded from full collections.
                gc.collect()
                gc.freeze()
                await stopping.wait()
                is_draining = requests.should_exit = True
                parts.pool.stop()
                await pool_task
                await requests_task
                # Before the queue closes: the leader releases its lease.
                for task in work:
                    task.cancel()
                await asyncio.wait(work)
            for task in background:
                task.cancel()
            admin.should_exit = True
            await admin_task


async def _store_answers(storage: Storage, stopping: asyncio.Event) -> bool:
    """Wait until the store can be used. Return False if the process has to end first.

    Raises:
        CannotStart: if the store can never be used.
    """
    while not stopping.is_set():
        try:
            await storage.check()
        except StoreRefused as error:
            raise CannotStart(str(error)) from error
        except StorageError as error:
            metrics.STORE_FAILURES.labels("check").inc()
            log.warning("the store cannot be used yet", error=str(error))
            await happens_within(stopping, _CHECK_S)
        else:
            return True
    return False


async def _sweep(parts: BatchParts) -> None:
    """Delete expired objects every hour, in the leader."""
    await asyncio.sleep(_FIRST_SWEEP_S)
    while True:
        with noted("sweep", "the store was not swept"):
            if await parts.queue.leads("sweep"):
                swept = await parts.storage.sweeper.sweep(parts.api.clock())
                log.info("store swept", **asdict(swept))
        await asyncio.sleep(_SWEEP_S)


def _requests_config(parts: BatchParts) -> uvicorn.Config:
    config = server_config(create_app(parts.api))
    config.http = connection_class(CLIENT_TIMEOUT_S)
    config.timeout_graceful_shutdown = _END_S
    return config
