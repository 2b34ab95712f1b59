"""Turns of long work that keys share fairly, so that no key waits for all the work of another."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class KeyTurns:
    """A number of concurrent turns. Waiting keys get them in rotation.

    The last free turn is reserved for a key without a turn. So a key that waits for more never holds all
    turns, and another key waits at most for one turn of each key before it.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiters by key in order of arrival; the keys in the order of their next turns."""

    @asynccontextmanager
    async def turn(self, key_id: str) -> AsyncIterator[None]:
        """Hold a turn of a key."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key_id, deque()).append(waiter)
        self._give_out()
        try:
            await waiter
            yield
        finally:
            if waiter.done() and not waiter.cancelled():
                self._held[key_id] -= 1
                if not self._held[key_id]:
                    del self._held[key_id]
                self._give_out()

    def _give_out(self) -> None:
        while (key_id := self._next_key()) is not None:
            waiters = self._waiting[key_id]
            waiter = waiters.popleft()
            self._waiting.move_to_end(key_id)
            if not waiters:
                del self._waiting[key_id]
            if not waiter.cancelled():
                self._held[key_id] += 1
                waiter.set_result(None)

    def _next_key(self) -> str | None:
        free = self._places - self._held.total()
        return next((key_id for key_id in self._waiting if free > (key_id in self._held)), None)
