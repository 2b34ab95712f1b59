"""A worker process: its main function, and its messages to the parent."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from typing import Final

import structlog
import uvloop

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.common import AllSettings, create_common
from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.processes.link import Link, end_with_parent
from fleetkeeper_gateway.batch.workers.handling import Handling, Memory
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.places import Places, Rows
from fleetkeeper_gateway.batch.workers.routes import Routes
from fleetkeeper_gateway.batch.workers.sender import UpstreamSender
from fleetkeeper_gateway.batch.workers.worker import Worker
from fleetkeeper_gateway.grants.signer import BatchTokenSigner, create_key_files
from fleetkeeper_gateway.server import allow_open_files, bound_memory
from fleetkeeper_gateway.telemetry.logs import configure_logs

log = structlog.get_logger(__name__)

_TELL_S: Final = 2.0


def main(name: str, index: int, rows: Rows, memory: Memory, parent: socket.socket) -> None:
    """Run lines until a SIGTERM, or the end of the parent.

    Args:
        name: name of this process in the queue.
        index: index of this process, from 0.
        rows: the places of all processes.
        memory: shared memory for the line whose answer is handled.
        parent: the socket to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal also sends it to the parent
    # Memory from before the fork is shared with the other processes until a process writes to it.
    gc.freeze()
    settings = AllSettings()
    configure_logs(settings.batch.log_level, settings.batch.log_format)
    structlog.contextvars.bind_contextvars(worker=index)
    allow_open_files()
    end_with_parent()
    bound_memory(settings.batch.batch_process_bytes)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        places = Places(rows, index, settings.batch.batch_concurrency)
        runner.run(_run(settings, name, places, Handling(memory), parent))


async def _run(
    settings: AllSettings, name: str, places: Places, handling: Handling, parent: socket.socket
) -> None:
    batch = settings.batch
    link = await Link.open(parent)
    async with create_common(settings, name, is_child=True) as (storage, queue):
        may_read = asyncio.Event()
        may_read.set()
        sender = UpstreamSender(
            batch.batch_upstream,
            tokens=BatchTokenSigner(create_key_files(settings.grants)),
            key_file=batch.batch_upstream_key_file,
            timeout_s=batch.batch_line_timeout_seconds,
            answer_bytes=batch.batch_answer_bytes,
            may_read=may_read,
        )
        routes = Routes(lambda key_id, model: link.send({"route": [key_id, model]}))
        worker = Worker(
            queue,
            storage.batches,
            Inputs(storage.objects, storage.files),
            sender,
            places=places,
            handling=handling,
            drain_s=batch.batch_drain_seconds,
            end_s=batch.batch_end_seconds,
            may_read=may_read,
            route=routes,
            wake=routes.wake,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(_report(link)),
                tasks.create_task(_listen(link, routes)),
                tasks.create_task(queue.run()),
            ]
            await worker.run()
            link.send({"measured": metrics.measured()})
            for task in beside:
                task.cancel()
        await sender.close()
    log.info("worker process ends")


async def _report(link: Link) -> None:
    """Send the counts to the parent periodically."""
    while True:
        link.send({"measured": metrics.measured()})
        await link.sent()
        await asyncio.sleep(_TELL_S)


async def _listen(link: Link, routes: Routes) -> None:
    """Handle the parent's messages."""
    async for message in link.messages():
        key_id, model, *route = message["route"]
        routes.note(key_id, model, Route(*route))
