# ruff: noqa: ARG002 - the Protocols name the arguments
"""Parts for the work of the batch process: a real store in a directory, and a queue in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fleetkeeper_gateway.batch.interfaces import (
    NO_ROUTES,
    Answer,
    Commit,
    QueueDown,
    StorageError,
    Taken,
    flow_of,
)
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    LineRef,
    Result,
    Validated,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, create_storage

GUARD_S: Final = 90.0
MODEL: Final = "m"
KEY: Final = "key-1"
ENDPOINT: Final = "/v1/chat/completions"


def storage_in(directory: Path) -> Storage:
    """Return a store in a directory."""
    settings = BatchSettings(batch_store=f"file://{directory}", batch_store_shared=True)
    return create_storage(settings)


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


async def whole(data: bytes) -> AsyncIterator[bytes]:
    """Return the parts of a text."""
    yield data


async def put_file(storage: Storage, record: BatchRecord, text: bytes) -> None:
    """Write the input file of a batch."""
    path = storage.files.data_path(record.key_id, record.input_file)
    size = await storage.objects.write(path, whole(text))
    await storage.files.put(
        FileRecord(record.input_file, record.key_id, "in.jsonl", "batch", size, int(time.time()))
    )


async def put_batch(
    storage: Storage, lines: int = 10, number: int = 0, padding: str = "", **changes: Any
) -> tuple[BatchRecord, Validated, list[LineRef]]:
    """Write a validated batch."""
    record = batch_record(number, **changes)
    text = input_text(lines, padding)
    refs = line_refs(text)
    await put_file(storage, record, text)
    assert await storage.batches.create(record)
    validated = Validated(lines, MODEL, lines * 100, int(time.time()))
    await storage.batches.put_validated(record, validated, refs)
    return record, validated, refs


async def output_of(
    storage: Storage, record: BatchRecord, file_id: str | None
) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is none."""
    if file_id is None:
        return []
    assert await storage.files.get(record.key_id, file_id) is not None
    data = await storage.objects.read(storage.files.data_path(record.key_id, file_id))
    assert data is not None
    return [json.loads(line) for line in data.splitlines()]


def number_of(line: Mapping[str, Any]) -> int:
    """Return the number of the input line that a line of a file is about."""
    return int(line["custom_id"].removeprefix("c-"))


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
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {GUARD_S:g} s in vain: {what}") from None


@dataclass
class _Line:
    line: LineRef
    attempts: int = 0
    fence: int | None = None


@dataclass
class _Batch:
    record: BatchRecord
    model: str
    lines: dict[int, _Line]
    waiting: list[int]
    done: dict[int, Commit] = field(default_factory=dict)


class MemoryQueue:
    """A queue as `interfaces` describes it, in memory. Leases end when a test says so."""

    def __init__(self) -> None:
        self.down = False
        self.leading = True
        self.batches: dict[str, _Batch] = {}
        self.fence = 0
        self.takes: list[dict[str, int]] = []
        self.given_back: list[tuple[int, bool]] = []
        self.renewed = 0
        self.resigned: list[str] = []
        self.commits: list[Sequence[Commit]] = []
        self.changed = asyncio.Event()

    def _check(self) -> None:
        if self.down:
            raise QueueDown("the test says so")

    async def add(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        self._check()
        known = {line.number: _Line(line) for line in lines}
        batch = _Batch(record, validated.model, known, list(known))
        self.batches.setdefault(record.id, batch)
        self.changed.set()

    async def take(
        self, free: Mapping[str, int], wait_s: float, routes: Mapping[str, str] = NO_ROUTES
    ) -> Sequence[Taken]:
        self._check()
        self.takes.append(dict(free))
        found = self._take(free, routes)
        if found or not wait_s:
            return found
        self.changed.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self.changed.wait()
        except TimeoutError:
            return []
        return self._take(free, routes)

    def _take(self, free: Mapping[str, int], routes: Mapping[str, str]) -> list[Taken]:
        """Take lines of all batches in turn."""
        found: list[Taken] = []
        left = dict(free)
        before = -1
        while len(found) > before:
            before = len(found)
            for batch in self.batches.values():
                name = routes.get(flow_of(batch.record.key_id, batch.model), "*")
                if batch.waiting and left.get(name, 0) > 0:
                    left[name] -= 1
                    found.append(self._lease(batch))
        return found

    def _lease(self, batch: _Batch) -> Taken:
        line = batch.lines[batch.waiting.pop(0)]
        self.fence += 1
        line.fence = self.fence
        entry = f"0-{self.fence}"
        attempt = line.attempts + 1
        return Taken(batch.record, line.line, attempt, self.fence, entry, batch.model)

    def expire(self) -> None:
        """End all leases."""
        for batch in self.batches.values():
            for number, line in batch.lines.items():
                if line.fence is not None and number not in batch.done:
                    line.fence = None
                    batch.waiting.append(number)
        self.changed.set()

    def _held(self, taken: Taken) -> _Line | None:
        batch = self.batches.get(taken.batch.id)
        line = batch.lines[taken.line.number] if batch is not None else None
        return line if line is not None and line.fence == taken.fence else None

    async def renew(self, taken: Iterable[Taken]) -> set[Taken]:
        self._check()
        self.renewed += 1
        return {one for one in taken if self._held(one) is None}

    async def give_back(self, taken: Iterable[Taken], *, attempt_counts: bool) -> None:
        self._check()
        for one in taken:
            self.given_back.append((one.line.number, attempt_counts))
            line = self._held(one)
            if line is not None:
                line.fence = None
                line.attempts += attempt_counts
                self.batches[one.batch.id].waiting.append(one.line.number)
        self.changed.set()

    async def commit(self, commits: Sequence[Commit]) -> set[int]:
        self._check()
        self.commits.append(commits)
        counted = set()
        for one in commits:
            batch = self.batches.get(one.taken.batch.id)
            number = one.taken.line.number
            if batch is None or number in batch.done or self._held(one.taken) is None:
                continue
            batch.done[number] = one
            counted.add(number)
        return counted

    async def counts(self, record: BatchRecord) -> Counts | None:
        self._check()
        batch = self.batches.get(record.id)
        if batch is None:
            return None
        good = sum(one.ok for one in batch.done.values())
        return Counts(len(batch.lines), good, len(batch.done) - good)

    async def outstanding(self, record: BatchRecord) -> int | None:
        self._check()
        batch = self.batches.get(record.id)
        return None if batch is None else len(batch.lines) - len(batch.done)

    async def remove(self, record: BatchRecord) -> int:
        self._check()
        batch = self.batches.pop(record.id, None)
        if batch is None:
            return 0
        return sum(
            line.fence is not None and number not in batch.done
            for number, line in batch.lines.items()
        )

    async def leads(self, what: str) -> bool:
        self._check()
        return self.leading

    async def resign(self, what: str) -> None:
        self._check()
        self.resigned.append(what)


def ok(number: int = 0) -> Answer:
    """Return an answer of an engine."""
    return Answer(200, json.dumps({"id": "x", "number": number}).encode(), f"r-{number}")


Script = Callable[[int], Awaitable[Answer]]


class ScriptedSender:
    """Answers lines as a test says, and keeps which ones it was sent."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.sent: list[int] = []
        self.running = 0
        self.most = 0

    async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
        number = int(json.loads(body)["number"])
        self.sent.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.script(number) if self.script is not None else ok(number)
        finally:
            self.running -= 1


class FailingBatches:
    """Batches of a store of which some calls fail while a test says so."""

    def __init__(self, storage: Storage) -> None:
        self._batches = storage.batches
        self.failing: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._batches, name)

        async def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise StorageError("the test says so")
            return await found(*arguments)

        return found if name == "results" else call


def result(line: int, fence: int = 1, text: str = "", *, good: bool = True) -> Result:
    """Return a result whose text is a line of a file."""
    custom = {"custom_id": f"c-{line}", "fence": fence, "text": text}
    return Result(line, 1, fence, good, json.dumps(custom).encode())
