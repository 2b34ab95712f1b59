"""The turns in which bodies are parsed: one at a time, fair between tenants, at most half of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Final

MIN_PAUSE_S: Final = 0.001
"""CPU time of a turn from which the loop pauses parsing for the same time."""


class ReadingTurns:
    """Scheduler of the turns.

    A part with many values takes milliseconds. Without turns, each connection would parse a part between two
    steps of any other request, so a tenant with many connections would delay all.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiters by tenant, in the order of the tenants' next turns."""
        self._is_taken = False

    async def take(self, owner: Hashable) -> None:
        """Wait for a turn of an owner. `give_back` ends it."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def give_back(self, took_s: float) -> None:
        """End a turn that took this CPU time."""
        if took_s < MIN_PAUSE_S:
            self._next()
        else:
            asyncio.get_running_loop().call_later(took_s, self._next)

    def _next(self) -> None:
        while self._waiting:
            owner, turns = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
