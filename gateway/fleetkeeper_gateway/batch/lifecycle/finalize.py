"""The end of a batch: closes its logs, writes its output and error files, and then its `Final`.

The files are a function of the closed logs. Two processes may finalize a batch at the same time, each with
files of its own. The first `Final` counts, and the other process deletes its files.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final as Const

import structlog

from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Files,
    Index,
    Log,
    ObjectMissing,
    Objects,
    StorageError,
)
from fleetkeeper_gateway.batch.key_turns import KeyTurns
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Result,
    Status,
)
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lines import lost_line, unfinished_line

log = structlog.get_logger(__name__)

OUTPUT: Const = "output"
ERROR: Const = "error"
_LOGS_AT_ONCE: Const = 4
"""Maximum logs, of all batches, that are read concurrently. Each takes up to 16 MiB."""
_PART_BYTES: Const = 262_144


class Finalizer:
    """Closes the logs of ending batches, and writes their files."""

    def __init__(self, objects: Objects, files: Files, batches: Batches, inputs: Inputs) -> None:
        self._objects = objects
        self._files = files
        self._batches = batches
        self._inputs = inputs
        self._turns = KeyTurns(_LOGS_AT_ONCE)
        self._undecided: dict[str, list[FileRecord]] = {}
        """Files of attempts that failed while they wrote `Final`, by batch. One of the attempts may count."""

    async def finalize(self, record: BatchRecord, index: Index, status: Status) -> Final:
        """Close the logs of a batch, write its files, and write its end.

        Args:
            record: the batch.
            index: its lines and chunks.
            status: completed requires that all logs are closed. With cancelled, expired or failed, open
                logs are closed with error lines of this status. An expired or failed batch becomes
                completed if all its lines ran.

        Returns:
            The end of the batch.

        Raises:
            StorageError: if the store fails, or if the status is completed and a log is open or lines did
                not run. The end is undecided then, and the call may be repeated.
        """
        logs = await asyncio.gather(
            *(self._closed(record, index, chunk, status) for chunk in range(len(index.chunks)))
        )
        counts = _counts(logs)
        if counts.completed + counts.failed == counts.total:
            if status in {Status.EXPIRED, Status.FAILED}:
                status = Status.COMPLETED
        elif status is Status.COMPLETED:
            raise StorageError(f"logs of {record.id} were closed early by another process")
        output = error = None
        written: list[FileRecord] = []
        try:
            if counts.completed:
                good = self._parts(record, index, logs, ok=True)
                output = await self._write(record, OUTPUT, good, written)
            if counts.completed < counts.total:
                bad = self._parts(record, index, logs, ok=False)
                error = await self._write(record, ERROR, bad, written)
            for file in written:
                await self._files.put(file)
        except StorageError:
            await self._delete(written)
            raise
        self._undecided.setdefault(record.id, []).extend(written)
        final = Final(status, int(time.time()), counts, output, error)
        kept = await self._batches.put_final(record, final)
        await self.settle(record, kept)
        return kept

    async def _closed(self, record: BatchRecord, index: Index, chunk: int, status: Status) -> Log:
        """Return the closed log of a chunk. Close an open log, unless the status is completed."""
        found = self._batches.log(record, chunk, index.chunks[chunk])
        async with self._turns.turn(record.key_id):
            await found.read()
            if not found.closed and status is not Status.COMPLETED:
                missing = []
                for number in found.lines:
                    if number not in found.done:
                        custom_id = await self._custom_id(record, index[number])
                        text = unfinished_line(record, number, custom_id, status)
                        missing.append(Result(number, ok=False, text=text, ran=False))
                await found.append(missing, close=True)
        if not found.closed:
            raise StorageError(f"the log of chunk {chunk} of {record.id} is open")
        if len(found.done) < len(found.lines):
            log.error(
                "results are lost, because a part of a log was damaged",
                batch=record.id,
                chunk=chunk,
                lines=len(found.lines) - len(found.done),
            )
        return found

    async def settle(self, record: BatchRecord, final: Final) -> None:
        """Delete those files of an ended batch that do not count."""
        written = self._undecided.pop(record.id, [])
        if not final.mistakes:  # otherwise it is unknown which files count
            counting = {final.output_file, final.error_file}
            await self._delete([file for file in written if file.id not in counting])

    async def _parts(
        self, record: BatchRecord, index: Index, logs: Sequence[Log], *, ok: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a file, each with its end, in parts of a suitable size."""
        part = bytearray()
        for chunk_log in logs:
            completed = chunk_log.counts.completed
            if not (completed if ok else len(chunk_log.lines) - completed):
                continue
            texts = self._texts(record, index, chunk_log, ok=ok)
            async with self._turns.turn(record.key_id), aclosing(texts):
                async for text in texts:
                    part += text + b"\n"
                    if len(part) >= _PART_BYTES:
                        yield bytes(part)
                        part.clear()
        if part:
            yield bytes(part)

    async def _texts(
        self, record: BatchRecord, index: Index, found: Log, *, ok: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a file from one log, in order. A line with a lost result gets an error."""
        lost = [] if ok else [number for number in found.lines if number not in found.done]
        async for result in found.results(ok=ok):
            while lost and lost[0] < result.line:
                yield await self._lost(record, index[lost.pop(0)])
            yield result.text
        for number in lost:
            yield await self._lost(record, index[number])

    async def _lost(self, record: BatchRecord, line: LineRef) -> bytes:
        return lost_line(record, line.number, await self._custom_id(record, line))

    async def _custom_id(self, record: BatchRecord, line: LineRef) -> str:
        try:
            return (await self._inputs.request(record, line)).custom_id
        except (ObjectMissing, ValueError):
            # The custom_id is lost, and the batch has to end.
            return ""

    async def _write(
        self,
        record: BatchRecord,
        kind: str,
        parts: AsyncGenerator[bytes, None],
        written: list[FileRecord],
    ) -> str:
        """Write the bytes of a file, and add its record to `written`. Return its ID."""
        file_id = f"file-{uuid.uuid4().hex}"
        async with aclosing(parts):
            path = self._files.data_path(record.key_id, file_id)
            size = await self._objects.write(path, parts)
        now = int(time.time())
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
        """Delete files that do not count. If this fails, they are deleted after the retention."""
        for file in files:
            try:
                await self._files.delete(file.key_id, file.id)
                await self._objects.delete([self._files.data_path(file.key_id, file.id)])
            except StorageError as error:
                log.warning("a file that does not count stays", file=file.id, error=str(error))


def _counts(logs: Sequence[Log]) -> Counts:
    """Return the counts of a batch from its closed logs. A line with a lost result has failed."""
    lost = sum(len(chunk_log.lines) - len(chunk_log.done) for chunk_log in logs)
    return Counts(
        sum(chunk_log.counts.total for chunk_log in logs),
        sum(chunk_log.counts.completed for chunk_log in logs),
        sum(chunk_log.counts.failed for chunk_log in logs) + lost,
    )
