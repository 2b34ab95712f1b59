"""Wakes those who wait for lines, at the moment when a batch begins to wait.

A connection of its own reads the stream `wake` and blocks. It asks for what came after the last entry
that it saw, so nothing is missed between two reads. While it is not connected, the check of the link
finds lines that wait, once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from fleetkeeper_gateway.batch.queue.names import WAKE
from fleetkeeper_gateway.batch.queue.timing import Timing

log = structlog.get_logger(__name__)

BLOCK_S = 5
"""Time of one read without news. It shows that the server still answers."""


class Wake:
    """An event that many may wait for, set when lines wait."""

    def __init__(self, connect: Callable[[], AbstractConnection], timing: Timing) -> None:
        self._connect = connect
        self._timing = timing
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Return the event of the next time. To be asked before looking for lines."""
        return self._next

    def set(self) -> None:
        """Wake all who wait."""
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def run(self) -> None:
        """Read. Runs until it is cancelled."""
        while True:
            try:
                await self._read()
            except (RedisError, OSError, TimeoutError, ValueError) as error:
                # The link, to the same server, reports that it is down.
                log.debug("reading news of batches failed", reason=str(error))
            await asyncio.sleep(self._timing.retry_s)

    async def _read(self) -> None:
        connection = self._connect()
        last = b"0-0"  # the stream's one entry, if there is one, is news
        try:
            async with asyncio.timeout(self._timing.connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
            while True:
                async with asyncio.timeout(BLOCK_S + self._timing.call_s):
                    await connection.send_command(
                        "XREAD", "BLOCK", BLOCK_S * 1000, "STREAMS", WAKE, last
                    )
                    found = await connection.read_response(disable_decoding=True)
                if found:  # [[stream, [[ID, fields]]]]
                    last = found[0][1][-1][0]
                    self.set()
        finally:
            await connection.disconnect(nowait=True)
