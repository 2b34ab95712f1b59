"""What a worker process and its parent say to one another: lines of JSON through a socket.

The end of the socket is the end of the process, however it ended.

    child -> parent   {"route": [key, model]}           which service answers these lines?
    parent -> child   {"route": [key, model, NAME]}
    child -> parent   {"measured": [[series, value], ...]}, every 2 s: a child that says nothing hangs
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any, Final, Self

_LINE_BYTES: Final = 1_048_576


class Link:
    """One side of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, own: socket.socket) -> Self:
        """Use a socket. It is closed with the link."""
        return cls(*await asyncio.open_unix_connection(sock=own, limit=_LINE_BYTES))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Nobody may read it any more."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def sent(self) -> None:
        """Wait until the other side has read most of what was sent."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Return the messages of the other side, until it ends."""
        try:
            async for line in self._reader:
                yield json.loads(line)
        except ConnectionError:
            return

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


def end_with_parent() -> None:
    """End this process when its parent has ended, also if its event loop stands still then."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
