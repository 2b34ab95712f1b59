"""Validates the input file of a batch."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import Files, ObjectMissing, Objects, StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, FileRecord, LineRef, Mistake, Validated
from fleetkeeper_gateway.batch.validation.findings import Findings, decode_findings
from fleetkeeper_gateway.batch.validation.pipe import (
    ProcessDied,
    TimeUp,
    run_worker,
    worker_command,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.validation")

ATTEMPTS: Final = 3
"""Maximum processes that may end without a result for one file before its batch fails."""
KEPT: Final = 25
"""Maximum findings in memory, each of 1.3 MB with 50,000 lines and 100 mistakes."""
_SLICE: Final = 500
"""Number of lines that are decoded in one step of the event loop."""

_GONE = "The input file does not exist any more."
_TOO_SLOW = Mistake(
    "validation_too_slow", "The file takes too long to be read. Split it into several batches."
)

Estimate = Callable[[int, int | None, int], int]
"""Returns the estimated tokens of a request from its prompt's bytes, `max_tokens` and number of answers."""


class Validator:
    """Validates input files. The caller bounds the concurrency.

    A file is not read again for another batch with the same endpoint.
    """

    def __init__(
        self,
        objects: Objects,
        files: Files,
        estimate: Estimate,
        *,
        clock: Callable[[], float] = time.time,
        command: Callable[[str], Sequence[str]] = worker_command,
    ) -> None:
        self._objects = objects
        self._files = files
        self._estimate = estimate
        self._clock = clock
        self._command = command
        self._kept: OrderedDict[tuple[str, str, str], Findings] = OrderedDict()
        """Findings by key, file and endpoint, because the bytes of a file never change."""

    async def validate(self, record: BatchRecord) -> tuple[Validated, Sequence[LineRef]]:
        """Return the validation of a batch's input file, and the positions of its lines.

        With mistakes there are no lines. A cancellation kills the process that reads the file.

        Raises:
            StorageError: if the file cannot be read. The caller may retry.
        """
        # It may have expired since the batch was created.
        file = await self._files.get(record.key_id, record.input_file, may_be_expired=True)
        if file is None:
            return self._failed("file_not_found", _GONE)
        what = (file.key_id, file.id, record.endpoint)
        findings = self._kept.get(what)
        if findings is None:
            try:
                findings = await self._findings(record, file)
            except ObjectMissing:
                return self._failed("file_not_found", _GONE)
            if findings is None:
                return self._failed(
                    "validation_failed",
                    f"The process that reads the file ended {ATTEMPTS} times. Our log says how. "
                    "Create the batch again, or split the file.",
                )
        self._kept[what] = findings
        self._kept.move_to_end(what)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return await self._result(findings)

    async def _findings(self, record: BatchRecord, file: FileRecord) -> Findings | None:
        """Return the findings of a process; None if all attempts ended without a result."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._read(record.endpoint, file)
            except TimeUp:
                findings = Findings()
                findings.add_mistake_of_file(_TOO_SLOW)
                return findings
            except ProcessDied as error:
                log.warning(
                    "the process that validates a file died",
                    batch=record.id,
                    attempt=attempt,
                    error=str(error),
                )
        return None

    async def _read(self, endpoint: str, file: FileRecord) -> Findings:
        parts = self._objects.stream(self._files.data_path(file.key_id, file.id))
        output, fed = await run_worker(self._command(endpoint), parts)
        try:
            findings = decode_findings(output)
        except (ValueError, TypeError, KeyError) as error:
            raise ProcessDied(f"its answer cannot be read: {error}") from error
        if findings.read_all and fed != file.bytes:
            raise StorageError(f"{file.id} has {file.bytes} bytes, and {fed} were read")
        return findings

    async def _result(self, findings: Findings) -> tuple[Validated, Sequence[LineRef]]:
        mistakes = findings.reported()
        now = int(self._clock())
        if mistakes:
            return Validated(findings.lines, "", 0, now, mistakes), ()
        lines: list[LineRef] = []
        tokens = 0
        for start in range(0, findings.lines, _SLICE):
            for line in findings.found_lines(start, start + _SLICE):
                lines.append(LineRef(len(lines), line.offset, line.length))
                tokens += self._estimate(*line.asked)
            await asyncio.sleep(0)
        return Validated(findings.lines, findings.model, tokens, now), lines

    def _failed(self, code: str, message: str) -> tuple[Validated, Sequence[LineRef]]:
        mistake = Mistake(code, message)
        return Validated(0, "", 0, int(self._clock()), (mistake,)), ()
