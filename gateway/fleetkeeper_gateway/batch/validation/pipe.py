"""Runs the process that reads a file, feeds it, and takes what it found."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence

_BLOCK = 262_144


class ProcessDied(Exception):
    """The process ended without an answer."""


def worker_command(endpoint: str, max_lines: int, max_line_bytes: int) -> tuple[str, ...]:
    """Return the command of the process."""
    module = "fleetkeeper_gateway.batch.validation.worker"
    # -P: it imports nothing from the directory in which it happens to run.
    return (sys.executable, "-P", "-m", module, endpoint, str(max_lines), str(max_line_bytes))


async def run_worker(command: Sequence[str], parts: AsyncIterator[bytes]) -> tuple[bytes, int]:
    """Feed a file to a process. Return its output, and the bytes that it was given.

    The process has ended when this returns or raises, also if it is cancelled.

    Raises:
        ProcessDied: if the process cannot start, or ends with an error.
        StorageError: if a part of the file cannot be read.
    """
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    except OSError as error:
        raise ProcessDied(f"it cannot start: {error}") from error
    feeding = asyncio.ensure_future(_feed(process, parts))
    reading = asyncio.ensure_future(_read(process))
    try:
        fed, output = await asyncio.gather(feeding, reading)
        status = await process.wait()
    finally:
        feeding.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.cancel()
    if status != 0:
        raise ProcessDied(f"it ended with status {status}")
    return output, fed


async def _feed(process: Process, parts: AsyncIterator[bytes]) -> int:
    """Write the file. A process that ended takes no more: its status says why."""
    writer = process.stdin
    if writer is None:
        raise RuntimeError("the process has no standard input")
    fed = 0
    async for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), _BLOCK):
            block = view[start : start + _BLOCK]
            if writer.is_closing():
                # It ended while the store was slow. uvloop raises a RuntimeError for a write then.
                return fed
            try:
                writer.write(block)
                await writer.drain()
            except (BrokenPipeError, ConnectionResetError):
                return fed
            fed += len(block)
    writer.close()
    return fed


async def _read(process: Process) -> bytes:
    if process.stdout is None:
        raise RuntimeError("the process has no standard output")
    return await process.stdout.read()
