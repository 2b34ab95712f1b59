"""Reads lines of input files in blocks, each block once for neighboring lines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from fleetkeeper_gateway.batch.interfaces import Files, ObjectMissing, Objects
from fleetkeeper_gateway.batch.model import BatchRecord, LineRef
from fleetkeeper_gateway.batch.workers.lines import Request, parse_request

BLOCK_BYTES: Final = 1_048_576
_MAX_BLOCKS: Final = 16
_SHORT_BYTES: Final = 65_536
"""Maximum bytes of a line that is parsed on the event loop."""
_MAX_FILES: Final = 4096

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class Shared(Generic[Key, Found]):
    """A cache of the last results that computes each only once for concurrent callers. Errors are not cached."""

    def __init__(self, find: Callable[[Key], Coroutine[Any, Any, Found]], most: int) -> None:
        self._find = find
        self._most = most
        self._tasks: OrderedDict[Key, asyncio.Task[Found]] = OrderedDict()

    async def get(self, key: Key) -> Found:
        """Return the result for a key. The cancellation of a caller does not affect the others."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._find(key))
            task.add_done_callback(partial(self._ended, key))
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)
        return await asyncio.shield(task)

    def _ended(self, key: Key, task: asyncio.Task[Found]) -> None:
        has_failed = task.cancelled() or task.exception() is not None
        if has_failed and self._tasks.get(key) is task:
            del self._tasks[key]


class Inputs:
    """The lines of all input files, with the last blocks in memory (16 MiB)."""

    def __init__(self, objects: Objects, files: Files) -> None:
        self._objects = objects
        self._files = files
        self._blocks = Shared(self._read, _MAX_BLOCKS)
        self._sizes = Shared(self._size, _MAX_FILES)

    async def request(self, batch: BatchRecord, line: LineRef) -> Request:
        """Return the request of a line.

        Raises:
            ObjectMissing: if its file is missing, or ends before the line.
            StorageError: if the line cannot be read now.
            ValueError: if the line is not a request.
        """
        text = await self.line(batch, line)
        # A line of 16 MiB may take seconds.
        in_thread = len(text) > _SHORT_BYTES
        return await asyncio.to_thread(parse_request, text) if in_thread else parse_request(text)

    async def line(self, batch: BatchRecord, line: LineRef) -> bytes:
        """Return the bytes of a line.

        Raises:
            ObjectMissing: if its file is missing, or ends before the line. Its bytes never change.
            StorageError: if the line cannot be read now.
        """
        path = self._files.data_path(batch.key_id, batch.input_file)
        first, last = line.offset // BLOCK_BYTES, (line.offset + line.length - 1) // BLOCK_BYTES
        if last > first + 1:
            return await self._objects.read_range(path, line.offset, line.length)
        blocks = [await self._blocks.get((path, number)) for number in range(first, last + 1)]
        start = line.offset - first * BLOCK_BYTES
        found = b"".join(blocks)[start : start + line.length]
        if len(found) != line.length:
            raise ObjectMissing(f"{path} ends before line {line.number + 1} does")
        return found

    async def _read(self, block: tuple[str, int]) -> bytes:
        path, number = block
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, await self._sizes.get(path) - start)
        if length <= 0:
            raise ObjectMissing(f"{path} ends before byte {start}")
        return await self._objects.read_range(path, start, length)

    async def _size(self, path: str) -> int:
        # Not from the file's record: the file may expire while its batch runs, but its bytes stay.
        for found in await self._objects.list(path.rpartition("/")[0] + "/"):
            if found.path == path:
                return found.bytes
        raise ObjectMissing(f"{path} is gone: its file was deleted")
