"""The store of the batch process in memory, as `batch.interfaces` describes them."""

# ruff: noqa: ARG002 - the Protocols name the arguments
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from fleetkeeper_gateway.batch.interfaces import Index, Log, Object, ObjectMissing, StorageError
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Progress,
    Usage,
    Validated,
)
from fleetkeeper_gateway.interfaces import Key, KeyRefused


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
        self.streams = 0
        self.reading = 0
        """Streams that have begun, and those of them that have not ended."""
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
        self.streams += 1
        self.reading += 1
        try:
            for number, start in enumerate(range(0, len(data), self.piece_bytes)):
                if number == self.fail_streams_after:
                    raise StorageError("the store broke down")
                await asyncio.sleep(0)
                yield data[start : start + self.piece_bytes]
        finally:
            self.reading -= 1

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


RETENTION_S = 30 * 86_400
"""The default of the settings."""


class MemoryFiles:
    """Files, in the order of their creation. One that has expired does not exist; without a clock, none has."""

    def __init__(self, objects: MemoryObjects, wall: Callable[[], float] = float) -> None:
        self._objects = objects
        self._wall = wall
        self.kept: dict[tuple[str, str], FileRecord] = {}
        self.put_fails = False

    async def put(self, record: FileRecord) -> None:
        self._objects.check()
        if self.put_fails:
            raise StorageError("the record cannot be written")
        self.kept[record.key_id, record.id] = record

    async def get(
        self, key_id: str, file_id: str, *, may_be_expired: bool = False
    ) -> FileRecord | None:
        self._objects.check()
        found = self.kept.get((key_id, file_id))
        return found if may_be_expired or found in await self.list(key_id) else None

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        self._objects.check()
        return [
            record
            for record in reversed(self.kept.values())
            if record.key_id == key_id
            and self._wall() < (record.expires or record.created + RETENTION_S)
        ]

    async def usage(self, key_id: str) -> Usage:
        self._objects.check()
        sizes = [record.bytes for record in self.kept.values() if record.key_id == key_id]
        return Usage(len(sizes), sum(sizes))

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
        self.counts: dict[str, Counts] = {}
        """What the logs have."""
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

    async def ids(self, key_id: str) -> Sequence[str]:
        self._objects.check()
        return [record.id for record in reversed(self.kept.values()) if record.key_id == key_id]

    async def several(self, key_id: str, batch_ids: Sequence[str]) -> Sequence[BatchRecord]:
        found = [await self.get(key_id, batch_id) for batch_id in batch_ids]
        return [record for record in found if record is not None]

    async def active(self) -> Sequence[BatchRecord]:
        self._objects.check()
        return [record for record in self.kept.values() if record.id in self.markers]

    async def active_ids(self, key_id: str) -> Sequence[str]:
        return [record.id for record in await self.active() if record.key_id == key_id]

    async def make_room(self, key_id: str, most: int) -> int:
        self._objects.check()
        own = [record for record in self.kept.values() if record.key_id == key_id]
        gone = [one for one in own if one.id in self.ends and one.id not in self.markers]
        for record in gone[: 1 + len(own) - most if len(own) >= most else 0]:
            del self.kept[record.id]
            own.remove(record)
        return most - len(own)

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        self._objects.check()
        self.found.setdefault(record.id, (validated, lines))

    async def validated(self, record: BatchRecord) -> Validated | None:
        self._objects.check()
        return self.found[record.id][0] if record.id in self.found else None

    async def cancel(self, record: BatchRecord, at: int) -> None:
        self._objects.check()
        self.cancellations.setdefault(record.id, at)

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        self._objects.check()
        return self.cancellations.get(record.id)

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        self._objects.check()
        if record.id not in self.markers:
            raise ObjectMissing(f"the logs of {record.id} are gone")
        counts = self.counts.get(record.id, Counts(validated.lines))
        is_done = counts.completed + counts.failed >= validated.lines
        return Progress(counts, frozenset() if is_done else frozenset({0}))

    async def index(self, record: BatchRecord, lines: Sequence[LineRef] | None = None) -> Index:
        raise AssertionError("the API reads no lines")

    def log(self, record: BatchRecord, chunk: int, lines: range) -> Log:
        raise AssertionError("the API reads no results")

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        self._objects.check()
        return self.ends.setdefault(record.id, final)

    async def final(self, record: BatchRecord) -> Final | None:
        self._objects.check()
        return self.ends.get(record.id)

    async def forget_active(self, record: BatchRecord) -> None:
        self._objects.check()
        self.markers.discard(record.id)
        self.counts.pop(record.id, None)
