"""A TCP proxy whose answers arrive late: a server that is slow, or far away."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

READ_BYTES = 65_536
_Parts = asyncio.Queue[tuple[float, bytes]]


class SlowProxy:
    """Pass connections on to a port of this machine. `delay_s` may be changed at any time."""

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        """Time by which each part of an answer is late."""
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._pass_on(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass both directions on until one side ends."""
        from_target, to_target = await asyncio.open_connection("127.0.0.1", self._target)
        late: _Parts = asyncio.Queue()
        work = [
            asyncio.create_task(_copy(reader, to_target)),
            asyncio.create_task(self._collect(from_target, late)),
            asyncio.create_task(_deliver(late, writer)),
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            to_target.close()

    async def _collect(self, reader: asyncio.StreamReader, late: _Parts) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        while part := await reader.read(READ_BYTES):
            due = max(due, loop.time() + self.delay_s)  # parts stay in order
            late.put_nowait((due, part))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(READ_BYTES):
        writer.write(part)
        await writer.drain()


async def _deliver(late: _Parts, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, part = await late.get()
        await asyncio.sleep(due - loop.time())
        writer.write(part)
        await writer.drain()
