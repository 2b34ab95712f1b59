"""Reads lines of input files: block by block, each block once for the lines that are near."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping
from typing import Final, TypeVar

from fleetkeeper_gateway.batch.interfaces import Files, ObjectMissing, Objects
from fleetkeeper_gateway.batch.model import BatchRecord, LineRef
from fleetkeeper_gateway.batch.workers.lines import Request, parse_request

BLOCK_BYTES: Final = 1_048_576
_MOST_BLOCKS: Final = 32
_MOST_FILES: Final = 4096

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class Inputs:
    """The lines of all input files, with the last blocks in memory (32 MiB)."""

    def __init__(self, objects: Objects, files: Files) -> None:
        self._objects = objects
        self._files = files
        self._blocks: OrderedDict[tuple[str, int], asyncio.Task[bytes]] = OrderedDict()
        self._sizes: dict[str, asyncio.Task[int]] = {}

    async def request(self, batch: BatchRecord, line: LineRef) -> Request:
        """Return what a line asks for.

        Raises:
            ObjectMissing: if its file is gone, or ends before it.
            StorageError: if it cannot be read now.
            ValueError: if it is no request.
        """
        return parse_request(await self.line(batch, line))

    async def line(self, batch: BatchRecord, line: LineRef) -> bytes:
        """Return the bytes of a line.

        Raises:
            ObjectMissing: if its file is gone, or ends before it. Its bytes never change.
            StorageError: if it cannot be read now.
        """
        path = self._files.data_path(batch.key_id, batch.input_file)
        first, last = line.offset // BLOCK_BYTES, (line.offset + line.length - 1) // BLOCK_BYTES
        if last > first + 1:
            return await self._objects.read_range(path, line.offset, line.length)
        blocks = [await self._block(path, number) for number in range(first, last + 1)]
        start = line.offset - first * BLOCK_BYTES
        found = b"".join(blocks)[start : start + line.length]
        if len(found) != line.length:
            raise ObjectMissing(f"{path} ends before line {line.number + 1} does")
        return found

    async def _block(self, path: str, number: int) -> bytes:
        def read() -> asyncio.Task[bytes]:
            return asyncio.create_task(self._read(path, number))

        found = await _shared(self._blocks, (path, number), read)
        if (path, number) in self._blocks:
            self._blocks.move_to_end((path, number))
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return found

    async def _read(self, path: str, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, await self._size(path) - start)
        if length <= 0:
            raise ObjectMissing(f"{path} ends before byte {start}")
        return await self._objects.read_range(path, start, length)

    async def _size(self, path: str) -> int:
        if len(self._sizes) > _MOST_FILES:
            self._sizes.clear()

        def read() -> asyncio.Task[int]:
            return asyncio.create_task(self._read_size(path))

        return await _shared(self._sizes, path, read)

    async def _read_size(self, path: str) -> int:
        # Not from the file's record: the file may expire while its batch runs. Its bytes stay.
        for found in await self._objects.list(path.rpartition("/")[0] + "/"):
            if found.path == path:
                return found.bytes
        raise ObjectMissing(f"{path} is gone: its file was deleted")


async def _shared(
    tasks: MutableMapping[Key, asyncio.Task[Found]],
    key: Key,
    start: Callable[[], asyncio.Task[Found]],
) -> Found:
    """Return what one task finds for all who ask at the same time. A failure is not kept."""
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = start()

        def ended(done: asyncio.Task[Found]) -> None:
            has_failed = done.cancelled() or done.exception() is not None
            if has_failed and tasks.get(key) is done:
                del tasks[key]

        task.add_done_callback(ended)
    # Who asks may be cancelled; the others still wait.
    return await asyncio.shield(task)
