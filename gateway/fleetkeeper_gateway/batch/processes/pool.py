"""The worker processes of a replica: starts them, reads their messages, and replaces them when they end.

A process that ends while it handles the answer of a line has probably ended because of it, so this is noted
as an attempt of that line. Other lines that ran at the same time are not affected.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import happens_within, noted
from fleetkeeper_gateway.batch.interfaces import Batches, Queue, Route, StorageError, flow_of
from fleetkeeper_gateway.batch.model import Attempt, Trouble
from fleetkeeper_gateway.batch.processes.link import Link
from fleetkeeper_gateway.batch.workers.handling import Handling

log = structlog.get_logger(__name__)

_STEADY_S: Final = 30.0
"""Age from which an ended process is replaced at once."""
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_RETRY_S: Final = 1.0
_EXIT_S: Final = 5.0
"""Time for a process to end after its socket has ended."""
_LISTEN_S: Final = 2.0
_MAX_SILENT: Final = 30
"""Maximum consecutive periods of 2 s without a message. A process that is frozen, or hangs in an answer, would
hold its places forever."""


@dataclass(slots=True)
class Slot:
    """The slot of a process and of its replacements."""

    name: str
    """Name of the process in the queue."""
    handling: Handling
    start: Callable[[socket.socket], BaseProcess]
    """Creates a process, not started yet, with its end of the socket."""
    clear: Callable[[], None]
    """Clears its row of the shared memory after its end."""
    process: BaseProcess | None = None
    silent: int = 0
    is_killed: bool = False
    """True if the parent killed the process."""


class Pool:
    """Keeps the processes running until `stop`."""

    def __init__(
        self,
        slots: Sequence[Slot],
        batches: Batches,
        queue: Queue,
        *,
        route: Callable[[str, str], Route],
        shown: metrics.OfAllProcesses,
        stop_s: float,
    ) -> None:
        """Take the parts; `run` starts the processes.

        Args:
            slots: a slot for each process.
            batches: the store in which attempts are noted.
            queue: the queue to which chunks of an ended process return.
            route: returns the route of a key and model, for the processes.
            shown: gets the metrics of the processes.
            stop_s: time for the processes to end after `stop`.
        """
        self._slots = slots
        self._batches, self._queue = batches, queue
        self._route, self._shown = route, shown
        self._stop_s = stop_s
        self._stopping = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        """multiprocessing does not support concurrent starts and waits in several threads."""

    def stop(self) -> None:
        """Let the processes drain, and end `run` once they have ended."""
        self._stopping.set()

    async def run(self) -> None:
        """Keep the processes running."""
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = [
                    tasks.create_task(self._keep(index, slot))
                    for index, slot in enumerate(self._slots)
                ]
                while not await happens_within(self._stopping, _LISTEN_S):
                    self._kill_silent()
                for slot in self._slots:
                    if slot.process is not None:
                        slot.process.terminate()
                await asyncio.wait(kept, timeout=self._stop_s)
                for slot in self._slots:
                    _kill(slot)
        finally:
            for slot in self._slots:
                _kill(slot)

    def _kill_silent(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot.process is not None and slot.silent >= _MAX_SILENT:
                log.error("a worker process hangs, and is killed", worker=index)
                # Counts as an attempt of the line that it handles, whose answer may be the cause.
                slot.process.kill()
            slot.silent += 1

    # -- a slot -----------------------------------------------------------------------------------

    async def _keep(self, index: int, slot: Slot) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._live(index, slot)
            except (OSError, EOFError) as error:
                log.warning("a worker process cannot start", worker=index, error=str(error))
            await self._after_end(index, slot)
            if time.monotonic() - began >= _STEADY_S:
                pause_s = 0.0
            if pause_s:
                await happens_within(self._stopping, pause_s)
            pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))

    async def _live(self, index: int, slot: Slot) -> None:
        """Start a process, and read its messages until it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = slot.start(theirs)
            try:
                async with self._one_at_a_time:
                    await asyncio.to_thread(process.start)
            except BaseException:
                ours.close()
                raise
        slot.process, slot.silent, slot.is_killed = process, 0, False
        link = await Link.open(ours)
        log.info("worker process started", worker=index, pid=process.pid)
        if self._stopping.is_set():
            process.terminate()
        try:
            async for message in link.messages():
                slot.silent = 0
                if "measured" in message:
                    self._shown.note(index, message["measured"])
                else:
                    flow = message["route"]
                    link.send({"route": [*flow, *self._route_of(*flow)]})
        except ValueError:
            log.exception("a worker process cannot be understood", worker=index)
        finally:
            link.close()
            self._shown.end(index)
        async with self._one_at_a_time:
            await asyncio.to_thread(process.join, _EXIT_S)
            if process.is_alive():
                _kill(slot)
                await asyncio.to_thread(process.join)
        slot.process = None
        if not self._stopping.is_set():
            log.error(
                "a worker process ended", worker=index, pid=process.pid, status=process.exitcode
            )

    def _route_of(self, key_id: str, model: str) -> Route:
        with noted("route", "the service of a line cannot be found", key=key_id):
            return self._route(key_id, model)
        return Route(flow_of(key_id, model))

    # -- after the end of a process ---------------------------------------------------------------

    async def _after_end(self, index: int, slot: Slot) -> None:
        """Note the line that it handled, then return its chunks to the queue. New holders read the log first."""
        handled = slot.handling.read()
        slot.handling.clear()
        slot.clear()
        if not self._stopping.is_set():
            metrics.DEATHS.labels("no" if handled is None else "yes").inc()
        if handled is not None and not slot.is_killed:
            await self._blame(index, *handled)
        with noted("release", "chunks wait until their time is over", worker=index):
            await self._queue.release(slot.name)

    async def _blame(self, index: int, batch_id: str, line: int) -> None:
        """Note an attempt of the line whose answer was handled."""
        log.error(
            "the answer to a line ended a worker process", worker=index, batch=batch_id, line=line
        )
        while True:
            with noted(
                "attempt", "an attempt cannot be noted", batch=batch_id, line=line
            ) as failure:
                await self._note(batch_id, line)
            if not isinstance(failure.error, StorageError):
                return
            if await happens_within(self._stopping, _RETRY_S):
                return

    async def _note(self, batch_id: str, line: int) -> None:
        active = await self._batches.active()
        record = next((record for record in active if record.id == batch_id), None)
        if record is None:
            return  # the batch has ended meanwhile
        chunks = (await self._batches.index(record)).chunks
        chunk = next(number for number, lines in enumerate(chunks) if line in lines)
        chunk_log = self._batches.log(record, chunk, chunks[chunk])
        await chunk_log.read()
        if not chunk_log.closed and line not in chunk_log.done:
            await chunk_log.append((), [Attempt(line, Trouble.KILLED)])


def _kill(slot: Slot) -> None:
    """Kill a process. This does not count for the line that it handles."""
    if slot.process is not None:
        slot.is_killed = True
        slot.process.kill()
