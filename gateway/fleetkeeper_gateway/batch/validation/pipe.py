"""Runs a validation process: writes the file to it, and reads its findings."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress


class ProcessDied(Exception):
    """The process ended without a result."""


class TimeUp(Exception):
    """The process exceeded its CPU time. Another process would do the same."""


def worker_command(endpoint: str) -> tuple[str, ...]:
    """Return the command of the process."""
    module = "fleetkeeper_gateway.batch.validation.worker"
    # -P: no import from the working directory.
    return (sys.executable, "-P", "-m", module, endpoint)


async def run_worker(command: Sequence[str], parts: AsyncIterator[bytes]) -> tuple[bytes, int]:
    """Feed a file to a process. Return its output, and the number of bytes that it received.

    The process has ended when this returns or raises, also after a cancellation.

    Raises:
        ProcessDied: if the process cannot start, or ends with an error.
        TimeUp: if it exceeded its CPU time.
        StorageError: if a part of the file cannot be read.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    )
    try:
        process = await asyncio.shield(starting)
    except OSError as error:
        raise ProcessDied(f"it cannot start: {error}") from error
    except asyncio.CancelledError:
        # uvloop returns at once, and the process would end later.
        with suppress(OSError):
            await _end(await starting)
        raise
    feeding = asyncio.ensure_future(_feed(process, parts))
    reading = asyncio.ensure_future(_read(process))
    try:
        fed, output = await asyncio.gather(feeding, reading)
        status = await process.wait()
    finally:
        feeding.cancel()
        await _end(process)
        reading.cancel()
    if status == -signal.SIGXCPU:
        raise TimeUp
    if status != 0:
        raise ProcessDied(f"it ended with status {status}")
    return output, fed


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _feed(process: Process, parts: AsyncIterator[bytes]) -> int:
    """Write the file. If the process ends first, its exit status shows the reason."""
    writer = process.stdin
    if writer is None:
        raise RuntimeError("the process has no standard input")
    fed = 0
    async for part in parts:
        if writer.is_closing():
            # The process ended while the store was slow. In this case uvloop raises a RuntimeError for a write.
            return fed
        try:
            writer.write(part)
            await writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            return fed
        fed += len(part)
    writer.close()
    return fed


async def _read(process: Process) -> bytes:
    if process.stdout is None:
        raise RuntimeError("the process has no standard output")
    return await process.stdout.read()
