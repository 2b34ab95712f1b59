# ruff: noqa: ARG002 - the Protocols name the arguments
"""The parts that a worker uses, in memory, as `interfaces` describes them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fleetkeeper_gateway.batch.interfaces import (
    Answer,
    Held,
    Index,
    Object,
    ObjectMissing,
    QueueDown,
    StorageError,
    Waiting,
    flow_of,
)
from fleetkeeper_gateway.batch.model import Attempt, BatchRecord, LineRef, Result, Trouble
from fleetkeeper_gateway.batch.model import Final as End
from tests.support.guards import GUARD_S

MODEL: Final = "m"
KEY: Final = "key-1"
ENDPOINT: Final = "/v1/chat/completions"


def batch_record(number: int = 0, **changes: Any) -> BatchRecord:
    """Return a batch that expires in a day."""
    now = int(time.time())
    record = BatchRecord(
        id=f"batch_{number:032x}",
        key_id=KEY,
        input_file=f"file-{number:032x}",
        endpoint=ENDPOINT,
        completion_window="24h",
        created=now,
        expires=now + 86_400,
    )
    return replace(record, **changes)


def input_text(lines: int, padding: str = "") -> bytes:
    """Return an input file, with the number of each line in its body."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"c-{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {"model": MODEL, "number": number, "messages": [], "padding": padding},
            }
        ).encode()
        + b"\n"
        for number in range(lines)
    )


def line_refs(text: bytes) -> list[LineRef]:
    """Return where the lines of a file are."""
    refs, offset = [], 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        refs.append(LineRef(number, offset, len(line) - 1))
        offset += len(line)
    return refs


async def until(what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until something holds."""
    try:
        async with asyncio.timeout(GUARD_S):
            while True:
                held = holds()
                if not isinstance(held, bool):
                    held = await held
                if held:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {GUARD_S:g} s in vain: {what}") from None


class MemoryObjects:
    """Objects, of which reads can fail and are counted."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.reads: list[tuple[int, int]] = []
        self.failing = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a worker needs no {name}")

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        await asyncio.sleep(0)
        if self.failing:
            raise StorageError("the test says so")
        if path not in self.data:
            raise ObjectMissing(path)
        return self.data[path][offset : offset + length]

    async def list(self, prefix: str, *, after: str = "") -> Sequence[Object]:
        found = sorted(path for path in self.data if path.startswith(prefix) and path > after)
        return [Object(path, len(self.data[path]), 0.0) for path in found]


class MemoryFiles:
    """Where the bytes of files are. Their records are not needed."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a worker needs no {name}")

    def data_path(self, key_id: str, file_id: str) -> str:
        return f"{key_id}/files/{file_id}"


class MemoryIndex(Index):
    """Lines, cut into chunks of one size."""

    def __init__(self, lines: Sequence[LineRef], size: int) -> None:
        self._lines = lines
        self._chunks = [
            range(first, min(first + size, len(lines))) for first in range(0, len(lines), size)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: Any) -> Any:
        return self._lines[place]

    @property
    def chunks(self) -> Sequence[range]:
        return self._chunks


@dataclass
class Part:
    """A part of a log."""

    results: Sequence[Result]
    attempts: Sequence[Attempt]
    closing: bool


class MemoryLog:
    """A log whose parts all of its readers share."""

    def __init__(self, batches: MemoryBatches, parts: list[Part], lines: range) -> None:
        self._batches = batches
        self._parts = parts
        self._read = 0
        self._done: set[int] = set()
        self._troubles: Counter[Attempt] = Counter()
        self.lines = lines
        self.closed = False

    @property
    def done(self) -> AbstractSet[int]:
        return self._done

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a worker needs no {name}")

    def troubles(self, line: int, trouble: Trouble) -> int:
        return self._troubles[Attempt(line, trouble)]

    async def read(self) -> None:
        await self._batches.call("read")
        self._read_more()

    def _read_more(self) -> None:
        for part in self._parts[self._read :]:
            self._done.update(one.line for one in part.results)
            self._troubles.update(part.attempts)
            self.closed |= part.closing
        self._read = len(self._parts)

    async def append(
        self, results: Sequence[Result], attempts: Sequence[Attempt] = (), *, close: bool = False
    ) -> AbstractSet[int]:
        await self._batches.call("append")
        self._read_more()
        left = [one for one in results if one.line not in self._done]
        closing = close and len(left) + len(self._done) == len(self.lines)
        if self.closed or not (left or attempts or closing):
            return set()
        self._parts.append(Part(left, list(attempts), closing))
        self._read_more()
        return {one.line for one in left}


class MemoryBatches:
    """Indexes and logs. Calls fail, and wait, while a test says so."""

    def __init__(self) -> None:
        self.indexes: dict[str, MemoryIndex] = {}
        self.finals: dict[str, End] = {}
        self.parts: dict[tuple[str, int], list[Part]] = {}
        self.failing: set[str] = set()
        self.defects: set[str] = set()
        """IDs of batches whose logs end every append with a defect."""
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a worker needs no {name}")

    async def call(self, name: str) -> None:
        self.calls[name] += 1
        await asyncio.sleep(0)
        if name in self.failing:
            raise StorageError("the test says so")

    async def index(self, record: BatchRecord, lines: Sequence[LineRef] | None = None) -> Index:
        await self.call("index")
        if record.id not in self.indexes:
            raise ObjectMissing(record.id)
        return self.indexes[record.id]

    async def final(self, record: BatchRecord) -> End | None:
        await self.call("final")
        return self.finals.get(record.id)

    def log(self, record: BatchRecord, chunk: int, lines: range) -> MemoryLog:
        if record.id in self.defects:
            raise ValueError("the test says so")
        return MemoryLog(self, self.parts.setdefault((record.id, chunk), []), lines)

    def open_chunks(self, record: BatchRecord) -> list[int]:
        """Return the chunks whose log is not closed."""
        chunks = range(len(self.indexes[record.id].chunks))
        logs = [self.parts.get((record.id, chunk), []) for chunk in chunks]
        return [chunk for chunk in chunks if not any(part.closing for part in logs[chunk])]

    def results(self, record: BatchRecord) -> list[Result]:
        """Return all results, as often as they are written."""
        chunks = range(len(self.indexes[record.id].chunks))
        parts = itertools.chain(*(self.parts.get((record.id, chunk), []) for chunk in chunks))
        return [one for part in parts for one in part.results]


@dataclass
class _Batch:
    record: BatchRecord
    model: str
    waiting: deque[int] = field(default_factory=deque)
    held: dict[int, Held] = field(default_factory=dict)


class Queued:
    """What all processes share of the queue."""

    def __init__(self) -> None:
        self.batches: dict[str, _Batch] = {}
        self.running: dict[str, Mapping[str, int]] = {}
        self.entry = itertools.count()


class MemoryQueue:
    """The queue, as one process has it. Holds end when a test says so."""

    def __init__(self, queued: Queued, process: str = "p0") -> None:
        self.queued = queued
        self.process = process
        self.down = False
        self.taken: list[Held] = []
        self.given_back: list[Held] = []
        self.finished: list[Held] = []
        self.renewed = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a worker needs no {name}")

    def _check(self) -> None:
        if self.down:
            raise QueueDown("the test says so")

    async def add(self, record: BatchRecord, model: str, chunks: Iterable[int]) -> None:
        batch = self.queued.batches.setdefault(record.id, _Batch(record, model))
        batch.waiting.extend(one for one in chunks if one not in {*batch.waiting, *batch.held})

    async def keys(self) -> Mapping[str, int]:
        self._check()
        await asyncio.sleep(0)
        running: Counter[str] = Counter()
        for one in self.queued.running.values():
            running.update(one)
        waiting = [one for one in self.queued.batches.values() if one.waiting]
        return {one.record.key_id: running[one.record.key_id] for one in waiting}

    async def take(
        self, key_id: str, most: int, skip: Collection[str] = (), *, before: float | None = None
    ) -> Sequence[Held]:
        self._check()
        await asyncio.sleep(0)
        found: list[Held] = []
        for batch in sorted(self.queued.batches.values(), key=lambda one: one.record.expires):
            if batch.record.key_id != key_id or flow_of(key_id, batch.model) in skip:
                continue
            if before is not None and batch.record.expires >= before:
                continue
            while batch.waiting and len(found) < most:
                chunk = batch.waiting.popleft()
                held = Held(batch.record, batch.model, chunk, str(next(self.queued.entry)))
                batch.held[chunk] = held
                found.append(held)
        self.taken += found
        return found

    def _holds(self, held: Held) -> bool:
        batch = self.queued.batches.get(held.batch.id)
        return batch is not None and batch.held.get(held.chunk) == held

    async def renew(self, held: Iterable[Held], running: Mapping[str, int]) -> set[Held]:
        self._check()
        self.renewed += 1
        self.queued.running[self.process] = running
        return {one for one in held if not self._holds(one)}

    async def give_back(self, held: Iterable[Held]) -> None:
        self._check()
        for one in held:
            self.given_back.append(one)
            if self._holds(one):
                batch = self.queued.batches[one.batch.id]
                del batch.held[one.chunk]
                batch.waiting.append(one.chunk)

    async def done(self, held: Held) -> None:
        self._check()
        self.finished.append(held)
        batch = self.queued.batches.get(held.batch.id)
        if batch is not None:
            batch.held.pop(held.chunk, None)

    async def state(self, record: BatchRecord) -> Waiting | None:
        self._check()
        batch = self.queued.batches.get(record.id)
        return None if batch is None else Waiting(len(batch.held))

    async def remove(self, record: BatchRecord) -> None:
        self.queued.batches.pop(record.id, None)

    def expire(self) -> None:
        """Let all chunks wait again, as if they had not been renewed."""
        for batch in self.queued.batches.values():
            batch.waiting.extend(batch.held)
            batch.held.clear()


def ok(number: int = 0) -> Answer:
    """Return an answer of an engine."""
    return Answer(200, json.dumps({"id": "x", "number": number}).encode(), f"r-{number}")


Script = Callable[[str, str, int], Awaitable[Answer]]


class ScriptedSender:
    """Answers lines as a test says, and keeps which ones it was sent."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.sent: list[tuple[str, int]] = []
        """Keys and numbers of lines."""
        self.wakes: list[str | None] = []
        """Their wake headers."""
        self.running: Counter[str] = Counter()
        """Lines that are being answered, by key."""
        self.most: Counter[str] = Counter()
        self.bytes = self.most_bytes = 0
        """Of bodies that are held at the same time."""

    def times(self, number: int) -> int:
        """Return how often a line was sent."""
        return sum(one == number for _, one in self.sent)

    async def send(
        self, key_id: str, endpoint: str, body: bytes, wake: str | None = None
    ) -> Answer:
        found = json.loads(body)
        number, model = int(found["number"]), str(found["model"])
        self.sent.append((key_id, number))
        self.wakes.append(wake)
        self.running[key_id] += 1
        self.most[key_id] = max(self.most[key_id], self.running[key_id])
        self.bytes += len(body)
        self.most_bytes = max(self.most_bytes, self.bytes)
        try:
            if self.script is None:
                return ok(number)
            return await self.script(key_id, model, number)
        finally:
            self.running[key_id] -= 1
            self.bytes -= len(body)
