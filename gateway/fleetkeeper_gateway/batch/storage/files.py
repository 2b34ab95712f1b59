"""The files of all keys."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from fleetkeeper_gateway.batch.interfaces import Objects
from fleetkeeper_gateway.batch.model import FileRecord, Usage
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.records import Kind, Records

FILE: Final = Kind(
    "record of a file",
    FileRecord,
    lambda record: paths.file_object(record.key_id, record.id, paths.FILE_RECORD),
)
COUNTED_FOR_S: Final = 60.0
"""Maximum age of a count of a key's files: other replicas create and delete files, too."""


class StoredFiles:
    """The files of all keys, as objects. An expired file does not exist."""

    def __init__(
        self,
        objects: Objects,
        records: Records,
        *,
        retention_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._records = records
        self._retention_s = retention_s
        self._wall = wall
        self._counted: dict[str, tuple[float, Usage]] = {}
        """Monotonic time of the last count, and the count with this process's changes since."""
        self._changes: Counter[str] = Counter()
        """Number of changes by key. A list that is read during a change may or may not contain it."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def put(self, record: FileRecord) -> None:
        """Write the record of a file, whose bytes were written before. Idempotent: the first record counts."""
        path = paths.file_object(record.key_id, record.id, paths.FILE_RECORD)
        if await self._objects.create(path, FILE.encode(record)):
            self._note(record.key_id, 1, record.bytes)

    async def get(
        self, key_id: str, file_id: str, *, may_be_expired: bool = False
    ) -> FileRecord | None:
        """Return a file; None if the key has no file with that ID.

        Raises:
            BrokenObject: if its record is not valid.
        """
        if not (paths.is_key_id(key_id) and paths.is_file_id(file_id)):
            return None
        path = paths.file_object(key_id, file_id, paths.FILE_RECORD)
        record = await self._records.read(path, FILE)
        if record is None or may_be_expired or not self.has_expired(record, self._wall()):
            return record
        return None

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        """Return the files of a key, newest first. A broken record is logged and left out."""
        objects = await self._objects.list(paths.files_of(key_id))
        names = [stored.path for stored in objects if stored.path.endswith(f"/{paths.FILE_RECORD}")]
        records = await self._records.all(names, FILE)
        # In a thread: there may be tens of thousands.
        return await asyncio.to_thread(self._existing, records, self._wall())

    def _existing(self, records: Sequence[FileRecord], now: float) -> Sequence[FileRecord]:
        """Return the files that have not expired, newest first."""
        left = [record for record in records if not self.has_expired(record, now)]
        return sorted(left, key=lambda record: (record.created, record.id), reverse=True)

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""
        record = await self.get(key_id, file_id)
        if record is None:
            return False
        await self.remove(record)
        return True

    async def remove(self, record: FileRecord) -> None:
        """Delete a file, even if it has expired."""
        path = paths.file_object(record.key_id, record.id, paths.FILE_RECORD)
        # The record goes first: bytes without a record are swept later, but a record without bytes is wrong.
        await self._records.delete([path])
        await self._objects.delete([self.data_path(record.key_id, record.id)])
        self._note(record.key_id, -1, -record.bytes)

    def data_path(self, key_id: str, file_id: str) -> str:
        """Return the path of a file's bytes. Raise `BadPart`, a `ValueError`, for an invalid ID."""
        return paths.file_object(key_id, file_id, paths.DATA)

    def expiry(self, record: FileRecord) -> float:
        """Return the Unix seconds at which a file expires."""
        return record.expires if record.expires is not None else record.created + self._retention_s

    def has_expired(self, record: FileRecord, now: float) -> bool:
        """Return whether a file has expired."""
        return now >= self.expiry(record)

    async def usage(self, key_id: str) -> Usage:
        """Return the files and bytes of a key, including expired files that are not deleted yet.

        They are counted at most once a minute. In between, the count follows the changes of this process,
        but lags up to a minute behind those of other replicas.
        """
        async with self._turns[key_id]:
            counted = self._counted.get(key_id)
            if counted is None or time.monotonic() - counted[0] >= COUNTED_FOR_S:
                await self._count(key_id)
            return self._counted[key_id][1]

    async def _count(self, key_id: str) -> None:
        began, changes = time.monotonic(), self._changes[key_id]
        listed = await self._objects.list(paths.files_of(key_id))
        groups = await asyncio.to_thread(paths.by_owner, listed)
        sizes = [
            group[paths.DATA].bytes
            for group in groups.values()
            # A file without a record is an upload, which would count against its own quota.
            if group.keys() >= {paths.DATA, paths.FILE_RECORD}
        ]
        if self._changes[key_id] != changes:
            # Concurrent changes may be missing in the count, so the next call counts again.
            began -= COUNTED_FOR_S
        self._counted[key_id] = (began, Usage(len(sizes), sum(sizes)))

    def _note(self, key_id: str, files: int, size: int) -> None:
        self._changes[key_id] += 1
        if key_id in self._counted:
            at, usage = self._counted[key_id]
            kept = Usage(max(0, usage.files + files), max(0, usage.bytes + size))
            self._counted[key_id] = (at, kept)
