"""A pool of turns that namespaces share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Lane:
    """A pool of turns. A namespace holds at most as many turns as remain free.

    The waiting namespace that has waited longest is next. So a namespace with a thousand unresponsive
    pods delays no pod of another namespace.
    """

    def __init__(self, turns: int) -> None:
        self._free = turns
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Hold a turn."""
        if not self._take(namespace):
            await self._wait(namespace)
        try:
            yield
        finally:
            self._give_back(namespace)

    def _take(self, namespace: str) -> bool:
        if self._held[namespace] >= self._free:
            return False
        self._free -= 1
        self._held[namespace] += 1
        return True

    async def _wait(self, namespace: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(namespace)
            raise

    def _give_back(self, namespace: str) -> None:
        self._free += 1
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        for other in list(self._waiting):
            self._serve(other)

    def _serve(self, namespace: str) -> None:
        """Give a waiting namespace its next turn, if it may hold another."""
        turns = self._waiting[namespace]
        while turns and turns[0].done():  # cancelled
            turns.popleft()
        if turns and self._take(namespace):
            turns.popleft().set_result(None)
            self._waiting.move_to_end(namespace)
        if not turns:
            del self._waiting[namespace]
