"""The end of a batch: its output and error files, and how it ended.

Two processes may finalize a batch at the same time, for instance when Redis was lost. Each writes
files of its own. The first `Final` counts, and the other process deletes its files.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import structlog

from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Files,
    ObjectMissing,
    Objects,
    StorageError,
)
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Status,
)
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lines import unfinished_line
from fleetkeeper_gateway.batch.workers.merge import MEMORY_BYTES, Results, read_results

log = structlog.get_logger(__name__)

OUTPUT = "output"
ERROR = "error"


class Finalizer:
    """Writes the files of batches that end."""

    def __init__(
        self,
        objects: Objects,
        files: Files,
        batches: Batches,
        inputs: Inputs,
        *,
        wall: Callable[[], float] = time.time,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._objects = objects
        self._files = files
        self._batches = batches
        self._inputs = inputs
        self._wall = wall
        self._memory_bytes = memory_bytes
        self._undecided: dict[str, list[FileRecord]] = {}
        """Files of attempts that failed when the end was written, by batch."""

    async def finalize(
        self, record: BatchRecord, lines: Sequence[LineRef], status: Status
    ) -> Final | None:
        """Write the files of a batch, and keep how it ended.

        Args:
            record: the batch.
            lines: all its lines.
            status: completed, cancelled, expired or failed. Of the latter three, lines without a
                result get a line in the error file. If all have one, a batch that expired or failed
                is completed.

        Returns:
            How it ended; None if it is to be completed and results are missing.

        Raises:
            StorageError: if the store fails. Nothing has been decided.
        """
        results = await read_results(self._batches, record, len(lines), self._memory_bytes)
        missing = len(lines) - len(results.places)
        if missing and status is Status.COMPLETED:
            log.error("results are missing in the store", batch=record.id, lines=missing)
            return None
        if not missing and status in {Status.EXPIRED, Status.FAILED}:
            status = Status.COMPLETED
        done = [number for number in range(len(lines)) if _is_ok(results, number)]
        failed = [number for number in range(len(lines)) if not _is_ok(results, number)]

        async def unfinished(number: int) -> bytes:
            custom_id = await self._custom_id(record, lines[number])
            return unfinished_line(record, number, custom_id, status)

        written: list[FileRecord] = []
        try:
            output = await self._write(record, OUTPUT, results.lines(done, unfinished), written)
            errors = await self._write(record, ERROR, results.lines(failed, unfinished), written)
            for file in written:
                await self._files.put(file)
        except StorageError:
            await self._delete(written)
            raise
        counts = Counts(len(lines), completed=len(done), failed=len(failed) - missing)
        # Files of an attempt whose end is unknown may be those that count.
        candidates = self._undecided.setdefault(record.id, [])
        candidates += written
        kept = await self._batches.put_final(
            record, Final(status, int(self._wall()), counts, output, errors)
        )
        del self._undecided[record.id]
        counting = {kept.output_file, kept.error_file}
        await self._delete([file for file in candidates if file.id not in counting])
        return kept

    async def _custom_id(self, record: BatchRecord, line: LineRef) -> str:
        try:
            return (await self._inputs.request(record, line)).custom_id
        except (ObjectMissing, ValueError):
            # Nobody can tell the ID any more, and the batch has to end.
            return ""

    async def _write(
        self,
        record: BatchRecord,
        kind: str,
        parts: AsyncIterator[bytes],
        written: list[FileRecord],
    ) -> str | None:
        """Write a file; return its ID, None if it would be empty."""
        first = await anext(parts, None)
        if first is None:
            return None
        file_id = f"file-{uuid.uuid4().hex}"
        path = self._files.data_path(record.key_id, file_id)
        size = await self._objects.write(path, _with_first(first, parts))
        now = int(self._wall())
        after = record.output_expires_after
        written.append(
            FileRecord(
                id=file_id,
                key_id=record.key_id,
                filename=f"{record.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=size,
                created=now,
                expires=None if after is None else now + after,
            )
        )
        return file_id

    async def _delete(self, files: Sequence[FileRecord]) -> None:
        """Delete files that do not count. What cannot be deleted now is deleted after the retention."""
        for file in files:
            with suppress(StorageError):
                await self._files.delete(file.key_id, file.id)
                await self._objects.delete([self._files.data_path(file.key_id, file.id)])


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


def _is_ok(results: Results, number: int) -> bool:
    place = results.places.get(number)
    return place is not None and place.ok
