"""The files of all keys."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fleetkeeper_gateway.batch.interfaces import Objects
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.records import Kind, Records

FILE: Final = Kind(
    "record of a file",
    FileRecord,
    lambda record: paths.file_object(record.key_id, record.id, paths.FILE_RECORD),
)
COUNTED_FOR_S: Final = 60.0
"""Files of a key are counted again after this time: other replicas take and delete some too."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a key has stored."""

    files: int = 0
    bytes: int = 0

    def plus(self, files: int, size: int) -> Usage:
        """Return the usage after a change."""
        return Usage(max(0, self.files + files), max(0, self.bytes + size))


class StoredFiles:
    """The files of all keys, as objects. A file that has expired does not exist."""

    def __init__(
        self,
        objects: Objects,
        records: Records,
        *,
        retention_s: float,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._records = records
        self._retention_s = retention_s
        self._wall = wall
        self._monotonic = monotonic
        self._counted: dict[str, tuple[float, Usage]] = {}
        """Monotonic time of the count, and the count with what changed since."""
        self._missed: dict[str, list[tuple[int, int]]] = {}
        """Changes during a count that runs: its listing may have them or not."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def put(self, record: FileRecord) -> None:
        """Make a file whose bytes were written exist. Idempotent: the first record counts."""
        path = paths.file_object(record.key_id, record.id, paths.FILE_RECORD)
        if await self._objects.create(path, FILE.encode(record)):
            self._note(record.key_id, 1, record.bytes)

    async def get(self, key_id: str, file_id: str) -> FileRecord | None:
        """Return a file; None if the key has none of that ID.

        Raises:
            BrokenObject: if its record cannot be understood.
        """
        if not (paths.is_key_id(key_id) and paths.is_file_id(file_id)):
            return None
        path = paths.file_object(key_id, file_id, paths.FILE_RECORD)
        record = await self._records.read(path, FILE)
        return None if record is None or self.has_expired(record, self._wall()) else record

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        """Return the files of a key, newest first. A broken record is logged, and left out."""
        objects = await self._objects.list(paths.files_of(key_id))
        names = [one.path for one in objects if one.path.endswith(f"/{paths.FILE_RECORD}")]
        now = self._wall()
        records = [
            record
            for record in await self._records.all(names, FILE)
            if not self.has_expired(record, now)
        ]
        return sorted(records, key=lambda record: (record.created, record.id), reverse=True)

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""
        record = await self.get(key_id, file_id)
        if record is None:
            return False
        await self.remove(record)
        return True

    async def remove(self, record: FileRecord) -> None:
        """Delete a file, also if it has expired."""
        path = paths.file_object(record.key_id, record.id, paths.FILE_RECORD)
        # The record goes first: bytes without one are found later, a record without bytes is a lie.
        await self._objects.delete([path])
        self._records.forget(path)
        await self._objects.delete([self.data_path(record.key_id, record.id)])
        self._note(record.key_id, -1, -record.bytes)

    def data_path(self, key_id: str, file_id: str) -> str:
        """Return the path of a file's bytes. Raise `BadPart`, a `ValueError`, for what is no ID."""
        return paths.file_object(key_id, file_id, paths.DATA)

    def expiry(self, record: FileRecord) -> float:
        """Return the Unix seconds at which a file ceases to exist."""
        return record.expires if record.expires is not None else record.created + self._retention_s

    def has_expired(self, record: FileRecord, now: float) -> bool:
        """Return whether a file has ceased to exist."""
        return now >= self.expiry(record)

    async def usage(self, key_id: str) -> Usage:
        """Return what a key has stored.

        It is counted at most once a minute. Between, it follows what this process does; so it lags by a
        minute behind what other replicas do.
        """
        async with self._turns[key_id]:
            counted = self._counted.get(key_id)
            if counted is None or self._monotonic() - counted[0] >= COUNTED_FOR_S:
                await self._count(key_id)
            return self._counted[key_id][1]

    async def _count(self, key_id: str) -> None:
        began = self._monotonic()
        self._missed[key_id] = []
        try:
            objects = await self._objects.list(paths.files_of(key_id))
        finally:
            missed = self._missed.pop(key_id)
        sizes = [one.bytes for one in objects if one.path.endswith(f"/{paths.DATA}")]
        # With changes meanwhile the count may be off by them, so it holds for this once.
        self._counted[key_id] = (
            began - COUNTED_FOR_S if missed else began,
            Usage(len(sizes), sum(sizes)),
        )

    def _note(self, key_id: str, files: int, size: int) -> None:
        if key_id in self._missed:
            self._missed[key_id].append((files, size))
        elif key_id in self._counted:
            at, usage = self._counted[key_id]
            self._counted[key_id] = (at, usage.plus(files, size))
