"""A budget of memory that the lines of all keys in a process share."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """The budget. Without room, a line waits, in order of arrival for each key.

    A key may hold at most as many bytes as remain free: half of all if it is alone, less beside others. So
    other keys always find room.
    """

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def hold(self, key: str, size: int) -> AsyncIterator[None]:
        """Wait for room, and hold it in the block."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append((size, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._held[key] -= size
                if not self._held[key]:
                    del self._held[key]
                self._free += size
            self._grant()

    def _fits(self, key: str, size: int) -> bool:
        # A line that is larger than half of the budget runs alone.
        return self._held[key] + size <= self._free - size or self._free == self._total

    def _grant(self) -> None:
        for key, waiting in list(self._waiting.items()):
            while waiting and (waiting[0][1].cancelled() or self._fits(key, waiting[0][0])):
                size, granted = waiting.popleft()
                if not granted.cancelled():
                    self._held[key] += size
                    self._free -= size
                    granted.set_result(None)
            if not waiting:
                del self._waiting[key]
