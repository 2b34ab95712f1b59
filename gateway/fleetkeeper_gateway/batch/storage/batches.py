"""The batches of all keys, as their objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import ObjectMissing, Objects
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    LineRef,
    Result,
    Validated,
)
from fleetkeeper_gateway.batch.model import Final as End
from fleetkeeper_gateway.batch.storage import line_index, paths, segments
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.records import Kind, Records

log = structlog.get_logger(__name__)

SEGMENTS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class _Validation:
    """What the input file was found to be, and the index that belongs to it."""

    validated: Validated
    index: str
    """Digest of the index; empty if there is none, because no line will run."""


@dataclass(frozen=True, slots=True)
class _Cancel:
    at: int


BATCH: Final = Kind(
    "record of a batch",
    BatchRecord,
    lambda record: paths.batch_object(record.key_id, record.id, paths.BATCH_RECORD),
)
END: Final = Kind("record of the end of a batch", End)
_VALIDATION: Final = Kind("record of a validation", _Validation)
_CANCEL: Final = Kind("record of a cancellation", _Cancel)


class StoredBatches:
    """Batches as objects. See `paths` for their names, and `interfaces` for the order of writes."""

    def __init__(self, objects: Objects, records: Records) -> None:
        self._objects = objects
        self._records = records

    # -- what was asked for -----------------------------------------------------------------------

    async def create(self, record: BatchRecord) -> bool:
        """Write the marker and the record. Return False if the ID exists."""
        await self._objects.create(paths.marker(record.key_id, record.id), b"")
        return await self._objects.create(_path(record, paths.BATCH_RECORD), BATCH.encode(record))

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if the key has none of that ID.

        Raises:
            BrokenObject: if its record cannot be understood.
        """
        if not (paths.is_key_id(key_id) and paths.is_batch_id(batch_id)):
            return None
        path = paths.batch_object(key_id, batch_id, paths.BATCH_RECORD)
        return await self._records.read(path, BATCH)

    async def list(self, key_id: str) -> Sequence[BatchRecord]:
        """Return the batches of a key, newest first. A broken record is logged, and left out."""
        objects = await self._objects.list(paths.batches_of(key_id))
        names = [one.path for one in objects if one.path.endswith(f"/{paths.BATCH_RECORD}")]
        records = await self._records.all(names, BATCH)
        return sorted(records, key=lambda record: (record.created, record.id), reverse=True)

    async def active(self) -> Sequence[BatchRecord]:
        """Return the batches that have not ended, of all keys. A broken record is logged, and left out."""
        names = []
        for one in await self._objects.list(paths.ACTIVE):
            place = paths.parse_marker(one.path)
            if place is None:
                log.warning("an object is no marker of a batch", path=one.path)
            else:
                names.append(paths.batch_object(*place, paths.BATCH_RECORD))
        # A marker without a record: the batch is being created, or that has failed.
        return await self._records.all(names, BATCH)

    async def cancel(self, record: BatchRecord, at: int) -> None:
        """Ask for the end of a batch. Idempotent."""
        await self._objects.create(_path(record, paths.CANCEL), _CANCEL.encode(_Cancel(at)))

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return when the end was asked for."""
        found = await self._records.kept(_path(record, paths.CANCEL), _CANCEL)
        return None if found is None else found.at

    # -- the input --------------------------------------------------------------------------------

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Keep what the input file was found to be. The first one that is kept counts."""
        index = ""
        if lines:
            content = line_index.encode(lines)
            index = line_index.digest(content)
            await self._objects.create(paths.index(record.key_id, record.id, index), content)
        content = _VALIDATION.encode(_Validation(validated, index))
        await self._objects.create(_path(record, paths.VALIDATED), content)

    async def validated(self, record: BatchRecord) -> Validated | None:
        """Return what the input file was found to be."""
        found = await self._validation(record)
        return None if found is None else found.validated

    async def lines(self, record: BatchRecord) -> Sequence[LineRef]:
        """Return where the lines are. Only after `put_validated`.

        Raises:
            ObjectMissing: if the batch was not validated, or has ended.
            BrokenObject: if the index is not the one that was written.
        """
        found = await self._validation(record)
        if found is None:
            raise ObjectMissing(f"batch {record.id} was not validated")
        if not found.index:
            return ()
        path = paths.index(record.key_id, record.id, found.index)
        content = await self._objects.read(path)
        if content is None:
            raise ObjectMissing(f"{path} does not exist; batch {record.id} has ended")
        if line_index.digest(content) != found.index:
            raise BrokenObject(f"{path} is damaged. Restore it from a copy, or cancel the batch")
        return line_index.decode(content)

    async def _validation(self, record: BatchRecord) -> _Validation | None:
        return await self._records.kept(_path(record, paths.VALIDATED), _VALIDATION)

    # -- results ----------------------------------------------------------------------------------

    async def add_segment(self, record: BatchRecord, results: Sequence[Result]) -> str:
        """Write results, durably. Return the name of the segment, of 24 characters."""
        if not results:
            raise ValueError("a segment has at least one result")
        content = segments.encode(results)
        while True:
            name = segments.new_name(results)
            if await self._objects.create(paths.segment(record.key_id, record.id, name), content):
                return name

    async def results(self, record: BatchRecord) -> AsyncIterator[tuple[str, Sequence[Result]]]:
        """Return all segments with their names, by their lowest fence. A torn one is logged and left out."""
        prefix = paths.segments_of(record.key_id, record.id)
        found = [one.path for one in await self._objects.list(prefix)]
        names = sorted(found, key=lambda path: segments.order_of(path.removeprefix(prefix)))
        for first in range(0, len(names), SEGMENTS_AT_ONCE):
            some = names[first : first + SEGMENTS_AT_ONCE]
            contents = await asyncio.gather(*map(self._objects.read, some))
            for path, content in zip(some, contents, strict=True):
                if content is None:
                    continue
                try:
                    yield path.rpartition("/")[2], segments.decode(content)
                except segments.TornSegment as error:
                    log.warning(
                        "a segment is torn, so its results do not count",
                        path=path,
                        error=str(error),
                    )

    # -- the end ----------------------------------------------------------------------------------

    async def put_final(self, record: BatchRecord, final: End) -> End:
        """Keep how the batch ended. Return the one that counts: the first that was kept."""
        path = _path(record, paths.FINAL)
        if await self._objects.create(path, END.encode(final)):
            return final
        kept = await self.final(record)
        if kept is None:
            raise ObjectMissing(f"{path} existed, and was deleted")
        return kept

    async def final(self, record: BatchRecord) -> End | None:
        """Return how the batch ended."""
        return await self._records.kept(_path(record, paths.FINAL), END)

    async def forget_active(self, record: BatchRecord) -> None:
        """Remove the segments and the index of a batch that has ended, then its marker.

        Raises:
            ValueError: if it has not ended. Its results would be lost.
        """
        if await self.final(record) is None:
            raise ValueError(f"batch {record.id} has not ended")
        objects = await self._objects.list(paths.segments_of(record.key_id, record.id))
        index = await self._objects.list(paths.batch_root(record.key_id, record.id))
        leftovers = [one.path for one in objects] + [
            one.path for one in index if is_index(one.path)
        ]
        await self._objects.delete(leftovers)
        # The marker goes last: whoever finds it removes again what is left.
        await self._objects.delete([paths.marker(record.key_id, record.id)])


def is_index(path: str) -> bool:
    """Return whether an object of a batch is an index of lines."""
    return path.rpartition("/")[2].startswith(paths.INDEX_PREFIX)


def _path(record: BatchRecord, name: str) -> str:
    return paths.batch_object(record.key_id, record.id, name)
