"""The messages between a worker process and its parent: lines of JSON over a socket.

The socket ends with the process, after any kind of end.

    child -> parent   {"route": [key, model]}           which service answers these lines?
    parent -> child   {"route": [key, model, ...]}      the fields of a Route
    child -> parent   {"measured": [[series, value], ...]}, every 2 s: a silent child hangs
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
    """One end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, own: socket.socket) -> Self:
        """Open a link on a socket, which is closed with the link."""
        return cls(*await asyncio.open_unix_connection(sock=own, limit=_LINE_BYTES))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. It is lost if the other side has ended."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def sent(self) -> None:
        """Wait until the other side has read most of the sent bytes."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages of the other side until it ends."""
        try:
            async for line in self._reader:
                yield json.loads(line)
        except ConnectionError:
            return

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


def end_with_parent() -> None:
    """End this process when its parent ends, even if its event loop hangs."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
