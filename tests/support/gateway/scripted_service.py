"""A service behind the gateway that answers each request by a script: bytes, waits, or nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request that was read. The reader has what the gateway sends after it."""

JSON: Final = b'{"id": "cmpl-1", "choices": [{"index": 0, "text": "a b c"}]}'
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_MAX_HEAD_BYTES: Final = 131_072
_CHUNKED: Final = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(status: str = "200 OK", *headers: str) -> bytes:
    """Return a whole answer."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(JSON)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + JSON


def replies(data: bytes) -> Script:
    """Return a script that answers at once."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return script


answers: Final = replies(answer())


def waits(seconds: float) -> Script:
    """Return a script that does as an engine does for its clients: it takes time, and no processor."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        writer.write(answer())

    return script


async def hangs(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Answer nothing until the gateway hangs up."""
    await reader.read()


def floods(first: bytes, again: bytes) -> Script:
    """Return a script that sends bytes for as long as they are taken."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(again)
            await writer.drain()

    return script


floods_chunks: Final = floods(b"HTTP/1.1 200 OK\r\n" + _CHUNKED, b"1\r\nx\r\n" * 10_000)
floods_interim_answers: Final = floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000)


@contextlib.asynccontextmanager
async def serving(script: Script, asked: Callable[[], None] = lambda: None) -> AsyncIterator[int]:
    """Yield the port of a service. `asked` is called when a request has come as a whole."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                assert length is not None, head
                await reader.readexactly(int(length[1]))
                asked()
                await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the gateway hung up
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
