"""The socket on which the preStop hook (`fleetkeeper-engine drain`) begins a drain and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

DRAIN_SOCKET = "drain.sock"


async def serve_drain_socket(path: Path, drain: Callable[[], None], drained: asyncio.Event) -> None:
    """Begin the drain on `drain` from a client; answer when nothing runs any more."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if (await reader.readline()).strip() == b"drain":
                drain()
                await drained.wait()
                writer.write(b"drained\n")
                await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)  # noqa: ASYNC240 - the run directory is in memory
    server = await asyncio.start_unix_server(handle, path)
    path.chmod(0o600)  # noqa: ASYNC240 - as above
    async with server:
        await server.serve_forever()
