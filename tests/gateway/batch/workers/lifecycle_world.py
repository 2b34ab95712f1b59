# ruff: noqa: ARG002 - the Protocols name the arguments
"""A store and a queue in memory, as `interfaces` describes them, for tests of the life of batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError, Waiting
from fleetkeeper_gateway.batch.lifecycle.leader import Lifecycle
from fleetkeeper_gateway.batch.lifecycle.life import Left, Shared
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    LineRef,
    Mistake,
    Progress,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.model import Final as End
from fleetkeeper_gateway.batch.storage import BrokenObject
from tests.support.guards import GUARD_S

NOW: Final = time.time()
CHUNK: Final = 2
"""Lines of a chunk."""


@dataclass
class Stored:
    """What the store has of a batch."""

    record: BatchRecord
    lines: int
    is_active: bool = True
    validated: Validated | None = None
    is_damaged: bool = False
    cancelled: int | None = None
    done: set[int] = field(default_factory=set)
    """Lines that ran."""
    closed: set[int] = field(default_factory=set)
    finals: list[End] = field(default_factory=list)
    """All that were written; the first counts."""

    @property
    def chunks(self) -> list[range]:
        """Return the lines of each chunk."""
        firsts = range(0, self.lines, CHUNK)
        return [range(first, min(first + CHUNK, self.lines)) for first in firsts]

    def run(self, *chunks: int) -> None:
        """Write the results of chunks, and close their logs."""
        for chunk in set(chunks) - self.closed:
            self.closed.add(chunk)
            self.done.update(self.chunks[chunk])

    def validate(self) -> Validated:
        """Keep that the batch is valid."""
        self.validated = Validated(self.lines, "m", 100 * self.lines, int(NOW))
        return self.validated


class MemoryStore:
    """Batches, their finalizer and their validator. Calls fail while a test says so."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.failing: set[str] = set()
        self.calls: list[str] = []
        """Also those to the queue."""
        self.mistakes: tuple[Mistake, ...] = ()
        self.before: dict[str, Callable[[BatchRecord], Awaitable[None]]] = {}
        """What happens first in a call."""

    async def _called(self, name: str, record: BatchRecord | None = None) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if name in self.failing:
            raise StorageError("the test says so")
        if record is not None and name in self.before:
            await self.before[name](record)

    async def _of(self, name: str, record: BatchRecord) -> Stored:
        await self._called(name, record)
        return self[record]

    def __getitem__(self, record: BatchRecord) -> Stored:
        return self.stored[record.id]

    async def active(self) -> Sequence[BatchRecord]:
        await self._called("active")
        return [one.record for one in self.stored.values() if one.is_active]

    async def validate(self, record: BatchRecord) -> tuple[Validated, Sequence[LineRef]]:
        stored = await self._of("validate", record)
        if self.mistakes:
            return Validated(0, "", 0, int(NOW), self.mistakes), ()
        refs = [LineRef(number, number, 1) for number in range(stored.lines)]
        return Validated(stored.lines, "m", 100 * stored.lines, int(NOW)), refs

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        stored = await self._of("put_validated", record)
        stored.validated = stored.validated or validated

    async def validated(self, record: BatchRecord) -> Validated | None:
        return (await self._of("validated", record)).validated

    async def index(self, record: BatchRecord, lines: Sequence[LineRef] | None = None) -> Any:
        stored = await self._of("index", record)
        if stored.is_damaged and lines is None:
            raise BrokenObject("the test says so")
        return SimpleNamespace(chunks=stored.chunks, lines=lines)

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        return (await self._of("cancelled_at", record)).cancelled

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        stored = await self._of("progress", record)
        if stored.finals:
            return Progress(stored.finals[0].counts, frozenset())
        counts = Counts(stored.lines, len(stored.done), 0)
        return Progress(counts, frozenset(range(len(stored.chunks))) - stored.closed)

    async def put_final(self, record: BatchRecord, final: End) -> End:
        stored = await self._of("put_final", record)
        stored.finals.append(final)
        return stored.finals[0]

    async def final(self, record: BatchRecord) -> End | None:
        return next(iter((await self._of("final", record)).finals), None)

    async def forget_active(self, record: BatchRecord) -> None:
        stored = await self._of("forget_active", record)
        assert stored.finals
        assert "settle" in self.calls
        stored.is_active = False

    async def finalize(self, record: BatchRecord, index: Any, status: Status) -> End:
        stored = await self._of("finalize", record)
        if status is Status.COMPLETED:
            assert len(stored.closed) == len(stored.chunks), "a log is open"
        stored.closed.update(range(len(stored.chunks)))
        counts = Counts(stored.lines, len(stored.done), 0)
        return await self.put_final(record, End(status, int(NOW), counts))

    async def settle(self, record: BatchRecord, final: End) -> None:
        assert final == (await self._of("settle", record)).finals[0]


@dataclass
class Queued:
    """What the queue has of a batch."""

    chunks: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


class MemoryQueue:
    """A queue without workers. Its calls are counted, and fail, as those of the store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.server = 1
        self.down = False
        self.leading = True
        self.batches: dict[str, Queued] = {}
        self.adds: list[tuple[int, ...]] = []
        self.finished: list[str] = []
        self.resigned: list[str] = []

    def _called(self, name: str) -> None:
        self._store.calls.append(f"queue.{name}")
        if self.down or f"queue.{name}" in self._store.failing:
            raise QueueDown("the test says so")

    def __getitem__(self, record: BatchRecord) -> Queued:
        return self.batches[record.id]

    async def add(self, record: BatchRecord, model: str, chunks: Iterable[int]) -> None:
        self._called("add")
        assert model == "m"
        self.adds.append(tuple(chunks))
        self.batches.setdefault(record.id, Queued()).chunks.update(self.adds[-1])

    async def state(self, record: BatchRecord) -> Waiting | None:
        self._called("state")
        found = self.batches.get(record.id)
        return None if found is None else Waiting(len(found.held))

    async def emptied(self) -> Sequence[str]:
        self._called("emptied")
        found, self.finished = self.finished, []
        return found

    async def remove(self, record: BatchRecord) -> None:
        self._called("remove")
        self.batches.pop(record.id, None)

    async def leads(self, what: str) -> bool:
        self._called("leads")
        return self.leading

    async def resign(self, what: str) -> None:
        self._called("resign")
        self.resigned.append(what)


class World:
    """A process that leads, as far as batches know."""

    def __init__(self, store: MemoryStore, queue: MemoryQueue, end_s: float) -> None:
        self.store, self.queue = store, queue
        self.wall_s = NOW
        self.later_s = 0.0
        self.shown: list[Sequence[Left]] = []
        any_store: Any = store
        any_queue: Any = queue
        shared = Shared(
            batches=any_store,
            queue=any_queue,
            validate=store.validate,
            finalizer=any_store,
            end_s=end_s,
            wall=lambda: self.wall_s,
            monotonic=lambda: self.later_s + time.monotonic(),
        )
        self.lifecycle = Lifecycle(shared, self.shown.append)
        self.task: asyncio.Task[None]

    def create(self, lines: int = 5, number: int = 0, **changes: Any) -> BatchRecord:
        """Add a batch."""
        record = batch_record(number, **changes)
        self.store.stored[record.id] = Stored(record, lines)
        self.lifecycle.wake()
        return record

    async def create_queued(self, lines: int, number: int = 0, **changes: Any) -> BatchRecord:
        """Add a batch, and wait until it is queued."""
        record = self.create(lines, number, **changes)
        await self.queued(record)
        return record

    def run(self, record: BatchRecord, *chunks: int) -> None:
        """Run chunks as a worker does; all without an argument."""
        queued = self.queue[record]
        done = set(chunks or queued.chunks)
        assert done <= queued.chunks
        self.store[record].run(*done)
        queued.chunks -= done
        queued.held -= done
        if not queued.chunks:
            self.queue.finished.append(record.id)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until something holds."""
        try:
            async with asyncio.timeout(GUARD_S):
                while not holds():
                    assert not self.task.done(), self.task
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"waited {GUARD_S:g} s in vain: {what}") from None

    async def rounds(self, number: int = 4) -> None:
        """Wait until the batches were taken up some times."""
        before = len(self.shown)
        await self.until("rounds pass", lambda: len(self.shown) >= before + number)

    async def queued(self, record: BatchRecord) -> None:
        """Wait until a batch is queued."""
        await self.until("it is queued", lambda: record.id in self.queue.batches)

    async def ended(self, record: BatchRecord) -> End:
        """Wait until a batch has ended and is forgotten; return how it ended."""
        stored = self.store[record]
        await self.until(
            "it ends", lambda: not stored.is_active and record.id not in self.queue.batches
        )
        return stored.finals[0]


def batch_record(number: int = 0, **changes: Any) -> BatchRecord:
    """Return a batch that expires in a day."""
    now = int(NOW)
    record = BatchRecord(
        id=f"batch_{number:032x}",
        key_id="key-1",
        input_file=f"file-{number:032x}",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        created=now,
        expires=now + 86_400,
    )
    return replace(record, **changes)


@asynccontextmanager
async def leading(
    store: MemoryStore, queue: MemoryQueue, end_s: float = 60.0
) -> AsyncIterator[World]:
    """Yield a process that leads, if the queue lets it."""
    world = World(store, queue, end_s)
    world.task = asyncio.create_task(world.lifecycle.run())
    try:
        yield world
    finally:
        world.task.cancel()
        await asyncio.gather(world.task, return_exceptions=True)
