"""The batches of all keys, as objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import Object, ObjectMissing, Objects
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
from fleetkeeper_gateway.batch.storage import chunks, paths
from fleetkeeper_gateway.batch.storage.chunk_log import ChunkLog
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.progress import read_progress
from fleetkeeper_gateway.batch.storage.records import Kind, Records

log = structlog.get_logger(__name__)

ROOM_PART: Final = 20


@dataclass(frozen=True, slots=True)
class _Cancel:
    at: int


@dataclass(frozen=True, slots=True)
class _Validation:
    validated: Validated
    index: str
    """Digest of the index; empty without an index, because no line will run."""
    chunks: tuple[int, ...]
    """Number of the first line of each chunk."""


BATCH: Final = Kind(
    "record of a batch",
    BatchRecord,
    lambda record: paths.batch_object(record.key_id, record.id, paths.BATCH_RECORD),
)
END: Final = Kind("record of the end of a batch", End)
_CANCEL: Final = Kind("record of a cancellation", _Cancel)
_VALIDATION: Final = Kind("record of a validation", _Validation)
_DAMAGED: Final = Mistake(
    "batch_failed",
    "What was found in the input file is damaged in the store. Create the batch again.",
)
_END_DAMAGED: Final = Mistake(
    "batch_failed",
    "How the batch ended is damaged in the store. The list of files has its results, if there were any: "
    "their names begin with the ID of the batch.",
)


class StoredBatches:
    """The batches of all keys. See `paths` for the names of objects, and `interfaces` for the order of writes."""

    def __init__(self, objects: Objects, records: Records) -> None:
        self._objects = objects
        self._records = records

    # -- records ----------------------------------------------------------------------------------

    async def create(self, record: BatchRecord) -> bool:
        """Write the marker and the record. Return False if the ID exists."""
        await self._objects.create(paths.marker(record.key_id, record.id), b"")
        return await self._objects.create(_path(record, paths.BATCH_RECORD), BATCH.encode(record))

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if the key has no batch with that ID.

        Raises:
            BrokenObject: if its record is not valid.
        """
        if not (paths.is_key_id(key_id) and paths.is_batch_id(batch_id)):
            return None
        path = paths.batch_object(key_id, batch_id, paths.BATCH_RECORD)
        return await self._records.read(path, BATCH)

    async def ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the batches of a key, newest first. No record is read."""
        objects = await self._objects.list(paths.batches_of(key_id))
        # In a thread: there may be tens of thousands.
        return await asyncio.to_thread(_newest_first, objects)

    async def several(self, key_id: str, batch_ids: Sequence[str]) -> Sequence[BatchRecord]:
        """Return batches of a key in this order, without missing and broken ones."""
        return await self._several([(key_id, batch_id) for batch_id in batch_ids])

    async def active(self) -> Sequence[BatchRecord]:
        """Return the active batches of all keys. A broken record is logged and left out."""
        # A marker without a record: the batch is being created, or its creation failed.
        return await self._several(await self._markers(paths.ACTIVE))

    async def active_ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the active batches of a key. No record is read."""
        return [batch_id for _, batch_id in await self._markers(paths.markers_of(key_id))]

    async def _several(self, places: Sequence[tuple[str, str]]) -> Sequence[BatchRecord]:
        names = [paths.batch_object(*place, paths.BATCH_RECORD) for place in places]
        return await self._records.all(names, BATCH)

    async def _markers(self, prefix: str) -> list[tuple[str, str]]:
        """Return the key ID and batch ID of each marker below a prefix."""
        places = []
        for stored in await self._objects.list(prefix):
            place = paths.parse_marker(stored.path)
            if place is None:
                log.warning("an object is no marker of a batch", path=stored.path)
            else:
                places.append(place)
        return places

    async def make_room(self, key_id: str, most: int) -> int:
        """If a key has `most` batches, delete those that ended first. Return the number that it may add.

        Some extra batches are deleted, so that few new batches need a list of all. The files of a batch
        stay.
        """
        listed = await self._objects.list(paths.batches_of(key_id))
        groups = await asyncio.to_thread(paths.by_owner, listed)
        room = most - sum(paths.BATCH_RECORD in group for group in groups.values())
        if room > 0:
            return room
        active = set(await self.active_ids(key_id))
        ended = sorted(
            (group[paths.FINAL].modified, batch_id)
            for batch_id, group in groups.items()
            if group.keys() >= {paths.BATCH_RECORD, paths.FINAL} and batch_id not in active
        )
        gone = ended[: max(1, most // ROOM_PART) - room]
        await self.delete([groups[batch_id] for _, batch_id in gone])
        return room + len(gone)

    async def delete(self, groups: Sequence[paths.Group]) -> None:
        """Delete batches, given as the objects of each."""
        # Without its record a batch does not exist, even if other objects remain.
        await self._records.delete(group[paths.BATCH_RECORD].path for group in groups)
        await self._records.delete(stored.path for group in groups for stored in group.values())

    async def cancel(self, record: BatchRecord, at: int) -> None:
        """Request the cancellation of a batch. Idempotent."""
        await self._objects.create(_path(record, paths.CANCEL), _CANCEL.encode(_Cancel(at)))

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return the time of the cancellation request (of the creation, if it is damaged); None without a request."""
        try:
            found = await self._records.kept(_path(record, paths.CANCEL), _CANCEL)
        except BrokenObject as error:
            log.warning("it is not known when a batch was cancelled", reason=str(error))
            return record.created
        return None if found is None else found.at

    # -- the input --------------------------------------------------------------------------------

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Write the validation of the input file, and its chunks. The first writer wins."""
        index = ""
        if lines:
            # In a thread: other work on the event loop runs meanwhile.
            content = await asyncio.to_thread(chunks.encode, lines)
            index = chunks.digest(content)
            await self._objects.create(paths.index(record.key_id, record.id, index), content)
        firsts = chunks.cut(line.length for line in lines)
        content = _VALIDATION.encode(_Validation(validated, index, firsts))
        await self._objects.create(_path(record, paths.VALIDATED), content)

    async def validated(self, record: BatchRecord) -> Validated | None:
        """Return the validation of the input file; None before it is validated.

        If its object is damaged, the lines are lost. This is returned as a mistake, so the batch fails.
        """
        try:
            found = await self._records.kept(_path(record, paths.VALIDATED), _VALIDATION)
        except BrokenObject as error:
            log.warning("a batch fails, because its validation is damaged", reason=str(error))
            return Validated(0, "", 0, record.created, (_DAMAGED,))
        return None if found is None else found.validated

    async def index(
        self, record: BatchRecord, lines: Sequence[LineRef] | None = None
    ) -> chunks.LineIndex:
        """Return the index of lines and chunks. See `interfaces.Batches`.

        Raises:
            ObjectMissing: if the batch was not validated, or has ended.
            BrokenObject: if the index is not as it was written, or does not match the chunks.
        """
        found = await self._validation(record)
        path = _path(record, paths.VALIDATED)
        content = b"" if lines is None else chunks.encode(lines)
        if lines is None and found.index:
            path = paths.index(record.key_id, record.id, found.index)
            kept = await self._objects.read(path)
            if kept is None:
                raise ObjectMissing(f"{path} does not exist; batch {record.id} has ended")
            content = kept
            if chunks.digest(content) != found.index:
                raise BrokenObject(
                    f"{path} is damaged. Restore it from a copy, or cancel the batch"
                )
        try:
            return chunks.LineIndex(content, found.chunks)
        except ValueError as error:
            raise BrokenObject(f"{path} cannot be used: {error}. Cancel the batch") from error

    async def _validation(self, record: BatchRecord) -> _Validation:
        found = await self._records.kept(_path(record, paths.VALIDATED), _VALIDATION)
        if found is None:
            raise ObjectMissing(f"batch {record.id} was not validated")
        return found

    # -- results ----------------------------------------------------------------------------------

    def log(self, record: BatchRecord, chunk: int, lines: range) -> ChunkLog:
        """Return the log of a chunk, not yet read."""
        path = partial(paths.log_part, record.key_id, record.id, chunk)
        return ChunkLog(self._objects, path, lines)

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        """Return the progress in the logs of a batch. It never decreases. Each part is read once."""
        count = len((await self._validation(record)).chunks)
        progress = await read_progress(self._objects, self._records, record, count, validated.lines)
        # Logs are deleted only after the end is written. Without an end, the list had all of them.
        final = await self.final(record)
        if final is not None:
            return Progress(final.counts, frozenset())
        return progress

    # -- the end ----------------------------------------------------------------------------------

    async def put_final(self, record: BatchRecord, final: End) -> End:
        """Write the end of a batch. Return the one that counts, which is the first."""
        path = _path(record, paths.FINAL)
        if await self._objects.create(path, END.encode(final)):
            return final
        kept = await self.final(record)
        if kept is None:
            raise ObjectMissing(f"{path} existed, and was deleted")
        return kept

    async def final(self, record: BatchRecord) -> End | None:
        """Return the end of a batch. If it is damaged, the batch has failed."""
        try:
            return await self._records.kept(_path(record, paths.FINAL), END)
        except BrokenObject as error:
            log.warning("it is not known how a batch ended", reason=str(error))
            return End(Status.FAILED, record.created, Counts(), mistakes=(_END_DAMAGED,))

    async def forget_active(self, record: BatchRecord) -> None:
        """Remove the logs and the index of an ended batch, then its marker.

        Raises:
            ValueError: if the batch has not ended: its results would be lost.
        """
        if await self.final(record) is None:
            raise ValueError(f"batch {record.id} has not ended")
        logs = await self._objects.list(paths.logs_of(record.key_id, record.id))
        own = await self._objects.list(_path(record, ""))
        await self._objects.delete(stored.path for stored in paths.not_needed([*logs, *own]))
        # The marker is deleted last: a process that finds it removes the remaining objects.
        await self._objects.delete([paths.marker(record.key_id, record.id)])


def _newest_first(objects: Sequence[Object]) -> list[str]:
    """Return the IDs of the batches with a record among these objects, newest first."""
    end = f"/{paths.BATCH_RECORD}"
    found = sorted(
        (stored.modified, stored.path) for stored in objects if stored.path.endswith(end)
    )
    ids = [path.removesuffix(end).rpartition("/")[2] for _, path in reversed(found)]
    return [batch_id for batch_id in ids if paths.is_batch_id(batch_id)]


def _path(record: BatchRecord, name: str) -> str:
    return paths.batch_object(record.key_id, record.id, name)
