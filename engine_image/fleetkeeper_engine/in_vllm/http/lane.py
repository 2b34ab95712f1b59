"""A concurrency limit with a first-in-first-out queue, for work that the engine does not queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_engine.in_vllm.http.asgi import Inbox, Message, Send


class Lane:
    """Places for requests that take the API server's processor and no sequence of the engine.

    They are not part of admission's counts. Their end shows nothing about the engine's steps, so
    the supervisor would take a busy lane for a hung engine.
    """

    def __init__(self, at_once: int = 2, max_waiting: int = 32) -> None:
        self._free = at_once
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Return the number of free places."""
        return self._free

    async def acquire(self, inbox: Inbox) -> bool:
        """Take a place, or wait for one; return False if the client hung up in the meantime.

        Raises:
            RefusedBodyError: if the maximum number of requests waits already.
        """
        if self._free:
            self._free -= 1
            return True
        if len(self._waiting) >= self._max_waiting:
            raise RefusedBodyError(
                429, "queue_full", f"{self._max_waiting} requests already wait for the tokenizer."
            )
        loop = asyncio.get_running_loop()
        grant: asyncio.Future[None] = loop.create_future()
        self._waiting.append(grant)
        gone = loop.create_task(inbox.gone())
        acquired = False
        try:
            await asyncio.wait((grant, gone), return_when=asyncio.FIRST_COMPLETED)
            acquired = not gone.done()
        finally:
            gone.cancel()
            if not grant.done():
                self._waiting.remove(grant)
            elif not acquired:
                self.release()
        return acquired

    def release(self) -> None:
        """Return a place, or pass it to the next request."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1


class LanePlace:
    """A place in a lane. It is returned when the response begins, because sending takes no processor time."""

    def __init__(self, lane: Lane, send: Send) -> None:
        self._lane: Lane | None = lane
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message from the application."""
        self.release()
        return self._send(message)

    def release(self) -> None:
        """Return the place. Idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.release()
