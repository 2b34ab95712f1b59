"""Queues against a real Redis, with a store in memory and a clock that tests turn."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from fleetkeeper_gateway.batch.interfaces import Commit, Object, StorageError, Taken
from fleetkeeper_gateway.batch.model import BatchRecord, Final, LineRef, Result, Validated
from fleetkeeper_gateway.batch.queue import RedisQueue, Timing, create_queue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.limits import LimitSettings
from tests.support.redis_server import RedisServer

GUARD_S = 120.0
"""The limit of every wait. Events end a wait, so it only bounds how long a failure takes."""
LEASE_S = 3600.0
"""Longer than any test, so that only the clock of the test ends a lease."""
MODEL = "tiny"
LINE_BYTES = 300
_AGE_MS = 1_000_000_000
_numbers = itertools.count(1)

T = TypeVar("T")


@dataclass
class Clock:
    """Time that passes for leases, beside the server's own."""

    age_ms: int = _AGE_MS

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.age_ms -= int(seconds * 1000)
        assert self.age_ms >= 0


@dataclass
class MemoryObjects:
    """Objects as the interface has them."""

    found: dict[str, bytes] = field(default_factory=dict)
    down: bool = False
    """Whether every call fails."""

    def _answer(self) -> None:
        if self.down:
            raise StorageError("the store of this test does not answer")

    async def create(self, path: str, data: bytes) -> bool:
        await asyncio.sleep(0)
        self._answer()
        if path in self.found:
            return False
        self.found[path] = data
        return True

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        data = b"".join([part async for part in parts])
        self._answer()
        self.found[path] = data
        return len(data)

    async def read(self, path: str) -> bytes | None:
        await asyncio.sleep(0)
        self._answer()
        return self.found.get(path)

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        self._answer()
        return self.found[path][offset : offset + length]

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        self._answer()
        yield self.found[path]

    async def list(self, prefix: str, *, after: str = "") -> Sequence[Object]:
        await asyncio.sleep(0)
        self._answer()
        return [
            Object(path, len(data), 0.0)
            for path, data in sorted(self.found.items())
            if path.startswith(prefix) and path > after
        ]

    async def delete(self, paths: Iterable[str]) -> None:
        self._answer()
        for path in paths:
            self.found.pop(path, None)


@dataclass
class MemoryBatches:
    """Batches as the interface has them."""

    objects: MemoryObjects
    records: dict[str, BatchRecord] = field(default_factory=dict)
    ended: dict[str, Final] = field(default_factory=dict)
    found: dict[str, tuple[Validated, Sequence[LineRef]]] = field(default_factory=dict)
    segments: dict[str, dict[str, Sequence[Result]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    cancelled: dict[str, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    """Batches whose index cannot be read."""
    before_lines: Callable[[], Awaitable[None]] | None = None
    """Called before lines are read, in a rebuild."""

    async def create(self, record: BatchRecord) -> bool:
        if record.id in self.records:
            return False
        self.records[record.id] = record
        return True

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        found = self.records.get(batch_id)
        return found if found is not None and found.key_id == key_id else None

    async def list(self, key_id: str) -> Sequence[BatchRecord]:
        return [each for each in self.records.values() if each.key_id == key_id]

    async def active(self) -> Sequence[BatchRecord]:
        self.objects._answer()
        return list(self.records.values())

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        self.found.setdefault(record.id, (validated, lines))

    async def validated(self, record: BatchRecord) -> Validated | None:
        self.objects._answer()
        found = self.found.get(record.id)
        return None if found is None else found[0]

    async def lines(self, record: BatchRecord) -> Sequence[LineRef]:
        if self.before_lines is not None:
            await self.before_lines()
        self.objects._answer()
        if record.id not in self.found or record.id in self.damaged:
            raise StorageError(f"the index of {record.id} does not exist")
        return self.found[record.id][1]

    async def cancel(self, record: BatchRecord, at: int) -> None:
        self.cancelled.setdefault(record.id, at)

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        return self.cancelled.get(record.id)

    async def add_segment(self, record: BatchRecord, results: Sequence[Result]) -> str:
        self.objects._answer()
        name = f"{next(_numbers):024d}"
        self.segments[record.id][name] = tuple(results)
        return name

    async def results(self, record: BatchRecord) -> AsyncIterator[tuple[str, Sequence[Result]]]:
        self.objects._answer()
        for name, results in list(self.segments[record.id].items()):
            yield name, results

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        return self.ended.setdefault(record.id, final)

    async def final(self, record: BatchRecord) -> Final | None:
        self.objects._answer()
        return self.ended.get(record.id)

    async def forget_active(self, record: BatchRecord) -> None:
        self.records.pop(record.id, None)
        self.segments.pop(record.id, None)
        self.found.pop(record.id, None)


def batch_of(key_id: str = "key-a", *, expires: int = 86_400, created: int = 0) -> BatchRecord:
    """Return a new batch."""
    name = f"batch_{next(_numbers):032x}"
    return BatchRecord(
        name, key_id, "file-1", "/v1/chat/completions", "24h", created, expires, {"team": "ü"}
    )


def lines_of(count: int) -> list[LineRef]:
    """Return the lines of a file in which all lines have the same length."""
    return [LineRef(number, number * (LINE_BYTES + 1), LINE_BYTES) for number in range(count)]


PATIENT = Timing(
    lease_s=LEASE_S, check_s=0.05, retry_s=0.02, patience_s=3600, connect_s=GUARD_S, call_s=GUARD_S
)
"""Redis answers, however busy the machine is, and only the clock of the test ends a lease."""


@dataclass
class World:
    """One Redis, one store, and the queues of several processes."""

    redis: RedisServer
    objects: MemoryObjects = field(default_factory=MemoryObjects)
    clock: Clock = field(default_factory=Clock)
    queues: list[RedisQueue] = field(default_factory=list)
    registries: dict[int, CollectorRegistry] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = MemoryBatches(self.objects)

    def begin(self, name: str = "one", timing: Timing = PATIENT, **settings: str) -> RedisQueue:
        """Start the queue of a process."""
        registry = CollectorRegistry()
        values = {"redis_url": SecretStr(self.redis.url)} | settings
        queue = create_queue(
            BatchSettings(),
            LimitSettings(**values),  # type: ignore[arg-type]
            self.objects,
            self.batches,
            name,
            registry=registry,
            timing=replace(timing, age_ms=lambda: self.clock.age_ms),
        )
        self.queues.append(queue)
        self.registries[id(queue)] = registry
        self.tasks.append(asyncio.get_running_loop().create_task(queue.run()))
        return queue

    async def queue(self, name: str = "one", timing: Timing = PATIENT) -> RedisQueue:
        """Start the queue of a process, and wait until it is up."""
        queue = self.begin(name, timing)
        await queue.until_up(GUARD_S)
        return queue

    def value(self, queue: RedisQueue, name: str, **labels: str) -> float:
        """Return the value of a metric of the queue."""
        registry = self.registries[id(queue)]
        return registry.get_sample_value(f"fleetkeeper_gateway_batch_queue_{name}", labels) or 0.0

    async def submit(
        self, queue: RedisQueue, count: int, key_id: str = "key-a", *, model: str = MODEL,
        expires: int = 86_400,
    ) -> BatchRecord:  # fmt: skip
        """Create a batch, validate it, and queue it."""
        record = batch_of(key_id, expires=expires)
        await self.keep(record, count, model)
        await queue.add(record, *self.batches.found[record.id])
        return record

    async def keep(self, record: BatchRecord, count: int, model: str = MODEL) -> None:
        """Create a batch and validate it, without the queue."""
        await self.batches.create(record)
        validated = Validated(count, model, 100 * count, 0)
        await self.batches.put_validated(record, validated, lines_of(count))

    async def finish(
        self, queue: RedisQueue, taken: Sequence[Taken], *, ok: bool = True
    ) -> set[tuple[str, int]]:
        """Write the results of these lines, then commit them. Return those that count."""
        counted: set[tuple[str, int]] = set()
        for commits in await self.write(taken, ok=ok):
            name = commits[0].taken.batch.id
            counted |= {(name, line) for line in await queue.commit(commits)}
        return counted

    async def write(self, taken: Sequence[Taken], *, ok: bool = True) -> list[list[Commit]]:
        """Write a segment of results for each batch. Return what is to be committed."""
        found: dict[BatchRecord, list[Taken]] = defaultdict(list)
        for each in taken:
            found[each.batch].append(each)
        commits = []
        for record, lines in found.items():
            results = [
                Result(each.line.number, each.attempt, each.fence, ok, b"{}") for each in lines
            ]
            segment = await self.batches.add_segment(record, results)
            commits.append([Commit(each, segment, n, ok) for n, each in enumerate(lines)])
        return commits

    async def drain(self, queue: RedisQueue, slots: int = 64) -> list[Taken]:
        """Take and finish lines until none waits. Return them in order."""
        drained: list[Taken] = []
        while taken := await queue.take({"*": slots}, 0):
            drained += taken
            await self.finish(queue, taken)
        return drained

    async def until_reset(self, queue: RedisQueue, rebuilds: float) -> None:
        """Wait until this many rebuilds were done by all processes together, and the queue is up."""
        await until(lambda: self.rebuilds() >= rebuilds, "the queue is rebuilt")
        await queue.until_up(GUARD_S)

    def rebuilds(self) -> float:
        """Return the rebuilds of all processes together."""
        return sum(self.value(each, "rebuilds_total") for each in self.queues)

    def done(self, record: BatchRecord) -> dict[str, str]:
        """Return the done map in Redis."""
        with self.redis.client() as client:
            found = client.hgetall(f"fleetkeeper:batch:{{{record.id}}}:done")
        assert isinstance(found, dict)
        return found

    async def close(self) -> None:
        """Close all queues. A failure of one fails the test."""
        for queue in self.queues:
            await queue.close()
        for task in self.tasks:
            await task


async def until(ask: Callable[[], T], what: str) -> T:
    """Wait until something is true, and return it."""
    end = asyncio.get_running_loop().time() + GUARD_S
    while not (found := ask()):
        assert asyncio.get_running_loop().time() < end, f"never true: {what}"
        await asyncio.sleep(0.01)
    return found


def numbers(taken: Iterable[Taken]) -> list[int]:
    """Return the lines."""
    return [each.line.number for each in taken]
