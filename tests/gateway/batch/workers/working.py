"""Workers that run, with everything else in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fleetkeeper_gateway.batch.interfaces import Answer, Sender
from fleetkeeper_gateway.batch.model import BatchRecord, Result
from fleetkeeper_gateway.batch.workers.handling import Handling, create_memory
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.places import Places, create_rows
from fleetkeeper_gateway.batch.workers.worker import Worker
from tests.gateway.batch.workers.memory import (
    MODEL,
    MemoryBatches,
    MemoryFiles,
    MemoryIndex,
    MemoryObjects,
    MemoryQueue,
    Queued,
    ScriptedSender,
    batch_record,
    input_text,
    line_refs,
    ok,
    until,
)
from tests.support.guards import GUARD_S


class Gate:
    """Answers that wait until a test lets them."""

    def __init__(self, holds: Callable[[str, str, int], bool] = lambda *_: True) -> None:
        self.open = asyncio.Event()
        self._holds = holds

    async def __call__(self, key: str, model: str, number: int) -> Answer:
        if self._holds(key, model, number):
            await self.open.wait()
        return ok(number)


class Running:
    """Worker processes of one pod, as tasks."""

    def __init__(self, sender: Sender, processes: int, places: int) -> None:
        self.objects = MemoryObjects()
        self.batches = MemoryBatches()
        self.queued = Queued()
        self.sender = sender
        self.rows = create_rows(processes)
        self.places = places
        self.queues: list[MemoryQueue] = []
        self.handling: list[Handling] = []
        self.workers: list[Worker] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.options: dict[str, Any] = {}
        self.may_read = asyncio.Event()

    @property
    def queue(self) -> MemoryQueue:
        return self.queues[0]

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    def start(self, **options: Any) -> None:
        """Start a process."""
        number = len(self.workers)
        self.options = {"drain_s": GUARD_S, "end_s": 0.1, **options}
        self.queues.append(MemoryQueue(self.queued, f"p{number}"))
        self.handling.append(Handling(create_memory()))
        self.workers.append(self._worker(number))
        self.tasks.append(asyncio.create_task(self.workers[number].run()))

    def restart(self, number: int) -> None:
        """Start a process in place of one that ended."""
        self.workers[number] = self._worker(number)
        self.tasks[number] = asyncio.create_task(self.workers[number].run())

    def _worker(self, number: int) -> Worker:
        return Worker(
            self.queues[number],
            self.batches,
            Inputs(self.objects, MemoryFiles()),
            self.sender,
            places=Places(self.rows, number, self.places),
            handling=self.handling[number],
            may_read=self.may_read,
            **self.options,
        )

    async def batch(
        self,
        lines: int,
        number: int = 0,
        *,
        chunk: int = 256,
        padding: str = "",
        model: str = MODEL,
        **changes: Any,
    ) -> BatchRecord:
        """Queue a batch."""
        record = batch_record(number, **changes)
        text = input_text(lines, padding).replace(
            b'"model": "m"', f'"model": {json.dumps(model)}'.encode()
        )
        self.objects.data[MemoryFiles().data_path(record.key_id, record.input_file)] = text
        index = self.batches.indexes[record.id] = MemoryIndex(line_refs(text), chunk)
        await MemoryQueue(self.queued).add(record, model, range(len(index.chunks)))
        return record

    async def done(self, *records: BatchRecord) -> None:
        """Wait until all lines of batches have results."""
        for record in records:
            await until(f"{record.id} is done", lambda: self._is_done(record))  # noqa: B023

    def _is_done(self, record: BatchRecord) -> bool:
        ended = [task for task in self.tasks if task.done() and task.exception()]
        assert not ended, ended
        return not self.batches.open_chunks(record)

    def lines(self, record: BatchRecord) -> list[Result]:
        """Return the results of a batch, by line. Each line has one."""
        found = sorted(self.batches.results(record), key=lambda one: one.line)
        assert len({one.line for one in found}) == len(found)
        return found

    async def stop(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.stop()
        async with asyncio.timeout(GUARD_S):
            await asyncio.gather(*self.tasks)


@asynccontextmanager
async def working(
    sender: ScriptedSender, *, processes: int = 1, places: int = 32, **options: Any
) -> AsyncIterator[Running]:
    """Run workers."""
    found = Running(sender, processes, places)
    for _ in range(processes):
        found.start(**options)
    try:
        yield found
    except BaseException:
        # Lines that wait for the test would keep it.
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)
        raise
    await found.stop()
