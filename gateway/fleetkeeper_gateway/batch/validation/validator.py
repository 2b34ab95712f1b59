"""What the input file of a batch is found to be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import Files, ObjectMissing, Objects, StorageError
from fleetkeeper_gateway.batch.model import (
    MAX_LINES,
    BatchRecord,
    FileRecord,
    LineRef,
    Mistake,
    Validated,
)
from fleetkeeper_gateway.batch.validation.findings import Findings, decode_findings
from fleetkeeper_gateway.batch.validation.pipe import ProcessDied, run_worker, worker_command

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.validation")

MAX_LINE_BYTES: Final = 16_777_216
"""The gateway takes no larger request (its setting REQUEST_BYTES)."""
ATTEMPTS: Final = 3
"""Processes that may die over one file before its batch fails."""
_AT_ONCE: Final = 2
_SLICE: Final = 500
"""Lines that are unpacked before other work on the event loop runs."""

_GONE = "The input file does not exist any more."

Estimate = Callable[[int, int | None, int], int]
"""Returns the tokens of a request from what its body asks for."""


class Validator:
    """Checks input files, a few at a time."""

    def __init__(
        self,
        objects: Objects,
        files: Files,
        estimate: Estimate,
        *,
        clock: Callable[[], float] = time.time,
        max_lines: int = MAX_LINES,
        max_line_bytes: int = MAX_LINE_BYTES,
        command: Callable[[str, int, int], Sequence[str]] = worker_command,
    ) -> None:
        self._objects = objects
        self._files = files
        self._estimate = estimate
        self._clock = clock
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._command = command
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def validate(self, record: BatchRecord) -> tuple[Validated, Sequence[LineRef]]:
        """Return what the input file of a batch is, and where its lines are.

        There are no lines if there are mistakes. If it is cancelled, the process that reads the file
        is killed.

        Raises:
            StorageError: if the file cannot be read. The caller may try again.
        """
        async with self._turns:
            file = await self._files.get(record.key_id, record.input_file)
            if file is None:
                return self._failed("file_not_found", _GONE)
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
            return await self._result(findings)

    async def _findings(self, record: BatchRecord, file: FileRecord) -> Findings | None:
        """Return what a process finds; None if each one died."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._read(record.endpoint, file)
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
        command = self._command(endpoint, self._max_lines, self._max_line_bytes)
        output, fed = await run_worker(command, parts)
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
