"""Services that send far more messages or chunks than an answer needs, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from fleetkeeper_gateway.http import exchange
from fleetkeeper_gateway.http.connections import refused_bytes
from tests.gateway.http.world import World, chat, head, service
from tests.support.guards import GUARD_S

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
TOKEN = b"data: " + b"t" * 100 + b"\n\n"
PING = b": ping\n\n"
Write = Callable[[bytes], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def answering(
    world: World, script: Callable[[Write], Awaitable[None]]
) -> AsyncIterator[None]:
    """Serve the world's service by a script that writes bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await script(write)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        world.services.set(service(url=f"http://127.0.0.1:{port}"))
        async with asyncio.timeout(GUARD_S):
            yield


@pytest.mark.promise("service-floods")
async def test_interim_answers_without_end_are_no_answer(world: World) -> None:
    async def script(write: Write) -> None:
        while True:
            await write(INTERIM * 1000)

    async with answering(world, script):
        assert await world.refused() == (502, "upstream_failed")


@pytest.mark.promise("service-floods")
@pytest.mark.parametrize("flood", [INTERIM, CHUNKED + chunk(b"x") * 10_000])
async def test_a_service_that_floods_often_is_not_asked(
    world: World, monkeypatch: pytest.MonkeyPatch, flood: bytes
) -> None:
    monkeypatch.setattr(refused_bytes, "MAX_BYTES", exchange.FLOOD_BYTES)
    monkeypatch.setattr(refused_bytes, "BYTES_PER_S", 1e-3)
    asked = 0

    async def script(write: Write) -> None:
        nonlocal asked
        asked += 1
        while True:
            await write(flood)

    async with answering(world, script):
        for _ in range(4):
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with world.post() as response:
                    await response.read()
        assert asked == 2
        assert await world.refused() == (503, "service_unavailable")


async def test_some_interim_answers_are_passed_over(world: World) -> None:
    async def script(write: Write) -> None:
        await write(INTERIM * 10 + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with answering(world, script), world.post() as response:
        assert (response.status, await response.text()) == (200, "ok")


@pytest.mark.promise("service-floods")
async def test_an_answer_of_chunks_of_one_byte_is_cut(world: World) -> None:
    async def script(write: Write) -> None:
        await write(CHUNKED)
        while True:
            await write(chunk(b"x") * 10_000)

    async with answering(world, script):
        with pytest.raises(aiohttp.ClientError):
            async with world.post() as response:
                await response.read()
        await world.until(lambda: len(world.audit.requests) == 1)
        assert world.audit.requests[0]["outcome"] == "upstream_lost"


@pytest.mark.parametrize(
    ("frames", "batch"),
    [
        pytest.param([TOKEN] * 30_000, 1000, id="tokens"),
        pytest.param([PING] * 3000, 1, id="pings-before-a-token"),
        pytest.param([PING, TOKEN] * 5000, 100, id="pings-between-tokens"),
        pytest.param([b"x" * 2_000_000] * 2, 1, id="large"),
    ],
)
async def test_an_honest_stream_is_never_cut(world: World, frames: list[bytes], batch: int) -> None:
    async def script(write: Write) -> None:
        await write(CHUNKED)
        for start in range(0, len(frames), batch):
            await write(b"".join(map(chunk, frames[start : start + batch])))
        await write(END)

    async with answering(world, script), world.post() as response:
        assert await response.read() == b"".join(frames)


async def test_a_stream_for_a_slow_reader_is_not_cut(world: World) -> None:
    """The gateway reads no more than its reader takes, and knows less of the body then."""
    frames = TOKEN * 60_000

    async def script(write: Write) -> None:
        await write(CHUNKED)
        for start in range(0, len(frames), len(TOKEN) * 1000):
            part = frames[start : start + len(TOKEN) * 1000]
            pieces = [part[at : at + len(TOKEN)] for at in range(0, len(part), len(TOKEN))]
            await write(b"".join(map(chunk, pieces)))
        await write(END)

    body = chat()
    async with answering(world, script):
        reader, writer = await world.raw(
            head(f"Content-Length: {len(body)}", "Connection: close") + body
        )
        part = b"the head"
        while part:
            part = await reader.read(20_000)
        writer.close()
        await world.until(lambda: len(world.audit.requests) == 1)
        assert world.audit.requests[0]["outcome"] == "ok"
