"""The slots of concurrent requests, and the pause that a 429 asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

DEFAULT_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 10.0


class RequestSlots:
    """Concurrency limiter of one client. A pause delays every unsent request."""

    def __init__(self, count: int) -> None:
        self._slots = asyncio.Semaphore(count)
        self._paused_until = 0.0

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Take one of the slots once no pause is in effect."""
        while True:
            await self.pause_over()
            async with self._slots:
                if asyncio.get_running_loop().time() >= self._paused_until:
                    yield
                    return

    def pause(self, retry_after_s: float | None) -> None:
        """Pause all requests for as long as the server asked, but for `MAX_RETRY_AFTER_S` at most."""
        pause_s = min(retry_after_s or DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S)
        until = asyncio.get_running_loop().time() + pause_s
        self._paused_until = max(self._paused_until, until)

    async def pause_over(self) -> None:
        """Wait until the current pause ends; a later 429 may extend it."""
        await asyncio.sleep(self._paused_until - asyncio.get_running_loop().time())
