"""The store and the queue of the batch process in memory, as `batch.interfaces` describes them."""

# ruff: noqa: ARG002 - the Protocols name the arguments
from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_gateway.batch.interfaces import (
    NO_ROUTES,
    Commit,
    Object,
    ObjectMissing,
    QueueDown,
    StorageError,
    Taken,
    flow_of,
)
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Result,
    Validated,
)
from fleetkeeper_gateway.interfaces import Key, KeyRefused

LEASE_S = 30.0


class MemoryKeys:
    """Keys by their secret: `Bearer secret-of-ID` is the key ID."""

    synced = True

    def __init__(self, *ids: str) -> None:
        self.in_use = set(ids)

    def authenticate(self, authorization: str | None, now: float) -> Key:
        if authorization is None:
            raise KeyRefused("missing_api_key", "Send a key.")
        key_id = authorization.removeprefix("Bearer secret-of-")
        if key_id not in self.in_use:
            raise KeyRefused("invalid_api_key", "The API key is not valid.")
        return Key(key_id, key_id, frozenset({"team"}))

    def named(self, key_id: str, now: float) -> Key:
        return self.authenticate(f"Bearer secret-of-{key_id}", now)

    def in_force(self, key_id: str, now: float) -> bool:
        return key_id in self.in_use


class MemoryAudit:
    """The audit log as a list."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.added = asyncio.Event()

    def request(self, **fields: Any) -> None:
        self.requests.append(fields)
        self.added.set()

    def change(self, **fields: Any) -> None:
        raise AssertionError("nobody changes keys here")


class MemoryObjects:
    """Objects by their path."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.down = False
        """Every call fails."""
        self.piece_bytes = 65_536
        self.unfinished = 0
        """Objects that are being written."""
        self.most_unfinished = 0
        self.fail_streams_after: int | None = None
        """Pieces of a stream, after which it fails."""

    def check(self) -> None:
        if self.down:
            raise StorageError("the store is down")

    async def create(self, path: str, data: bytes) -> bool:
        self.check()
        if path in self.kept:
            return False
        self.kept[path] = data
        return True

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        self.check()
        self.unfinished += 1
        self.most_unfinished = max(self.most_unfinished, self.unfinished)
        try:
            data = b"".join([part async for part in parts])
        finally:
            self.unfinished -= 1
        self.check()
        self.kept[path] = data
        return len(data)

    async def read(self, path: str) -> bytes | None:
        self.check()
        return self.kept.get(path)

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        self.check()
        return self._found(path)[offset : offset + length]

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        self.check()
        data = self._found(path)
        for number, start in enumerate(range(0, len(data), self.piece_bytes)):
            if number == self.fail_streams_after:
                raise StorageError("the store broke down")
            await asyncio.sleep(0)
            yield data[start : start + self.piece_bytes]

    async def list(self, prefix: str, *, after: str = "") -> Sequence[Object]:
        self.check()
        return [
            Object(path, len(data), 0.0)
            for path, data in sorted(self.kept.items())
            if path.startswith(prefix) and path > after
        ]

    async def delete(self, paths: Iterable[str]) -> None:
        self.check()
        for path in paths:
            self.kept.pop(path, None)

    def _found(self, path: str) -> bytes:
        if path not in self.kept:
            raise ObjectMissing(f"{path} does not exist")
        return self.kept[path]


class MemoryFiles:
    """Files, in the order of their creation."""

    def __init__(self, objects: MemoryObjects) -> None:
        self._objects = objects
        self.kept: dict[tuple[str, str], FileRecord] = {}
        self.put_fails = False

    async def put(self, record: FileRecord) -> None:
        self._objects.check()
        if self.put_fails:
            raise StorageError("the record cannot be written")
        self.kept[record.key_id, record.id] = record

    async def get(self, key_id: str, file_id: str) -> FileRecord | None:
        self._objects.check()
        return self.kept.get((key_id, file_id))

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        self._objects.check()
        return [record for record in reversed(self.kept.values()) if record.key_id == key_id]

    async def delete(self, key_id: str, file_id: str) -> bool:
        self._objects.check()
        if self.kept.pop((key_id, file_id), None) is None:
            return False
        await self._objects.delete([self.data_path(key_id, file_id)])
        return True

    def data_path(self, key_id: str, file_id: str) -> str:
        return f"files/{key_id}/{file_id}/data"

    async def add(self, record: FileRecord, data: bytes) -> FileRecord:
        """Store a file whose bytes are known."""
        await self._objects.create(self.data_path(record.key_id, record.id), data)
        await self.put(record)
        return record


class MemoryBatches:
    """Batches, in the order of their creation."""

    def __init__(self, objects: MemoryObjects) -> None:
        self._objects = objects
        self.kept: dict[str, BatchRecord] = {}
        self.markers: set[str] = set()
        self.found: dict[str, tuple[Validated, Sequence[LineRef]]] = {}
        self.cancellations: dict[str, int] = {}
        self.segments: dict[str, dict[str, Sequence[Result]]] = {}
        self.ends: dict[str, Final] = {}

    async def create(self, record: BatchRecord) -> bool:
        self._objects.check()
        if record.id in self.kept:
            return False
        self.kept[record.id] = record
        self.markers.add(record.id)
        return True

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        self._objects.check()
        record = self.kept.get(batch_id)
        return record if record is not None and record.key_id == key_id else None

    async def list(self, key_id: str) -> Sequence[BatchRecord]:
        self._objects.check()
        return [record for record in reversed(self.kept.values()) if record.key_id == key_id]

    async def active(self) -> Sequence[BatchRecord]:
        self._objects.check()
        return [record for record in self.kept.values() if record.id in self.markers]

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        self._objects.check()
        self.found.setdefault(record.id, (validated, lines))

    async def validated(self, record: BatchRecord) -> Validated | None:
        self._objects.check()
        return self.found[record.id][0] if record.id in self.found else None

    async def lines(self, record: BatchRecord) -> Sequence[LineRef]:
        self._objects.check()
        return self.found[record.id][1]

    async def cancel(self, record: BatchRecord, at: int) -> None:
        self._objects.check()
        self.cancellations.setdefault(record.id, at)

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        self._objects.check()
        return self.cancellations.get(record.id)

    async def add_segment(self, record: BatchRecord, results: Sequence[Result]) -> str:
        self._objects.check()
        segments = self.segments.setdefault(record.id, {})
        name = f"segment-{len(segments)}"
        segments[name] = tuple(results)
        return name

    async def results(self, record: BatchRecord) -> AsyncIterator[tuple[str, Sequence[Result]]]:
        self._objects.check()
        for name, results in list(self.segments.get(record.id, {}).items()):
            yield name, results

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        self._objects.check()
        return self.ends.setdefault(record.id, final)

    async def final(self, record: BatchRecord) -> Final | None:
        self._objects.check()
        return self.ends.get(record.id)

    async def forget_active(self, record: BatchRecord) -> None:
        self._objects.check()
        self.markers.discard(record.id)
        self.segments.pop(record.id, None)


@dataclass(eq=False)
class _Queued:
    record: BatchRecord
    model: str
    lines: Mapping[int, LineRef]
    waiting: deque[int]
    attempts: Counter[int] = field(default_factory=Counter)
    running: dict[int, tuple[Taken, float]] = field(default_factory=dict)
    """Leases, with their ends."""
    done: dict[int, bool] = field(default_factory=dict)
    """Whether a line belongs in the output file."""


class MemoryQueue:
    """Lines that wait, run or are done, in one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batches: dict[str, _Queued] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._leads: dict[str, float] = {}
        self.down = False
        """Every call fails."""

    def _check(self) -> None:
        if self.down:
            raise QueueDown("the queue is down")

    async def add(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        self._check()
        if record.id not in self._batches:
            by_number = {line.number: line for line in lines}
            self._batches[record.id] = _Queued(record, validated.model, by_number, deque(by_number))
            self._changed.set()

    async def take(
        self, free: Mapping[str, int], wait_s: float, routes: Mapping[str, str] = NO_ROUTES
    ) -> Sequence[Taken]:
        self._check()
        taken = self._take(free, routes)
        if not taken:
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
            self._check()
            taken = self._take(free, routes)
        return taken

    def _take(self, free: Mapping[str, int], routes: Mapping[str, str]) -> list[Taken]:
        now, left = self._clock(), dict(free)
        taken = []
        for batch in sorted(self._batches.values(), key=lambda one: one.record.expires):
            self._expire(batch, now)
            route = routes.get(flow_of(batch.record.key_id, batch.model), "*")
            while batch.waiting and left.get(route, 0) > 0:
                left[route] -= 1
                number = batch.waiting.popleft()
                batch.attempts[number] += 1
                fence = next(self._numbers)
                line = Taken(
                    batch.record,
                    batch.lines[number],
                    batch.attempts[number],
                    fence,
                    f"{fence}-0",
                    batch.model,
                )
                batch.running[number] = (line, now + LEASE_S)
                taken.append(line)
        return taken

    def _expire(self, batch: _Queued, now: float) -> None:
        for number, (_, end) in list(batch.running.items()):
            if end <= now:
                del batch.running[number]
                batch.waiting.append(number)

    def _own(self, taken: Taken) -> _Queued | None:
        """Return the batch of a line that is still under this lease."""
        batch = self._batches.get(taken.batch.id)
        if batch is None:
            return None
        held, end = batch.running.get(taken.line.number, (None, 0.0))
        return batch if held == taken and end > self._clock() else None

    async def renew(self, taken: Iterable[Taken]) -> set[Taken]:
        self._check()
        lost = set()
        for one in taken:
            batch = self._own(one)
            if batch is None:
                lost.add(one)
            else:
                batch.running[one.line.number] = (one, self._clock() + LEASE_S)
        return lost

    async def give_back(self, taken: Iterable[Taken], *, attempt_counts: bool) -> None:
        self._check()
        for one in taken:
            batch = self._own(one)
            if batch is not None:
                del batch.running[one.line.number]
                batch.waiting.append(one.line.number)
                batch.attempts[one.line.number] -= not attempt_counts
                self._changed.set()

    async def commit(self, commits: Sequence[Commit]) -> set[int]:
        self._check()
        kept = set()
        for commit in commits:
            number = commit.taken.line.number
            batch = self._own(commit.taken)
            if batch is not None and number not in batch.done:
                batch.done[number] = commit.ok
                del batch.running[number]
                kept.add(number)
        return kept

    async def counts(self, record: BatchRecord) -> Counts | None:
        self._check()
        batch = self._batches.get(record.id)
        if batch is None:
            return None
        completed = sum(batch.done.values())
        return Counts(len(batch.lines), completed, len(batch.done) - completed)

    async def outstanding(self, record: BatchRecord) -> int | None:
        self._check()
        batch = self._batches.get(record.id)
        return None if batch is None else len(batch.lines) - len(batch.done)

    async def remove(self, record: BatchRecord) -> int:
        self._check()
        batch = self._batches.pop(record.id, None)
        return 0 if batch is None else len(batch.running)

    async def leads(self, what: str) -> bool:
        self._check()
        self._leads[what] = self._clock() + LEASE_S
        return True

    async def resign(self, what: str) -> None:
        self._check()
        self._leads.pop(what, None)
