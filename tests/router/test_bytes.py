"""What an engine receives is what the client sent, and the client gets what the engine answered."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Iterable

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from fleetkeeper_gateway.http.paths import INFERENCE
from fleetkeeper_router.settings import Policy
from tests.support.engine.router_world import Router, RouterWorld

READS_BODIES = [Policy.LEAST_LOADED, Policy.PREFIX_AWARE]
HEADERS = {
    "Authorization": "Bearer sk-1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "baggage": "a=b,c=%20d",
    "X-Request-Id": "r-1",
    "X-Session-ID": "s",
    "X-Fleetkeeper-Tier": "batch",
    "X-Forwarded-For": "10.0.0.9",
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    "X-Empty": "",
    "User-Agent": "test",
}
BODIES = {
    "empty": b"",
    "no JSON": b"\x00\xff{",
    "unknown fields": json.dumps({"model": "m", "new": {"a": [None, True, {"b": 1e-9}]}}).encode(),
    "as it is written": b'{ "model" : "m",\t"stream":null , "tools":[{"function":{"strict":true}}]}',
    "twice": b'{"model":"a","model":"b"}',
    "byte order mark": b'\xef\xbb\xbf{"model":"m"}',
}


@pytest.mark.parametrize("policy", READS_BODIES)
async def test_bodies_and_headers_pass_as_they_are(
    world: RouterWorld, session: aiohttp.ClientSession, policy: Policy
) -> None:
    (engine,) = await world.add(1)
    router = await world.router(policy)
    for path in [*sorted(INFERENCE), "/v1/responses?a=%2F&b=%20", "/v1/%C3%A4//b"]:
        for what, body in BODIES.items():
            async with session.post(
                URL(f"{router.url}{path}", encoded=True),
                data=body,
                headers=HEADERS,
                skip_auto_headers=["Accept-Encoding"],
            ) as response:
                assert response.status == 200, what
            found = engine.received.pop()
            assert (found.target, found.body) == (path, body)
            sent = {**HEADERS, "Host": found.header("Host"), "Content-Length": str(len(body))}
            extra = dict(found.headers).keys() - sent.keys()
            assert {name: found.header(name) for name in sent} == sent, what
            assert {name.lower() for name in extra} <= {"x-forwarded-proto"}


def chunks(data: bytes) -> Iterable[bytes]:
    dice = random.Random(len(data))
    while data:
        size = dice.choice([1, 100, 65_536])
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("policy", READS_BODIES)
@pytest.mark.parametrize("size", [200, 1 << 20, 16 << 20])
async def test_large_and_chunked_bodies_pass(
    world: RouterWorld, session: aiohttp.ClientSession, policy: Policy, size: int
) -> None:
    (engine,) = await world.add(1)
    router = await world.router(policy)
    data = random.Random(size).randbytes(size)

    async def parts() -> AsyncIterator[bytes]:
        for part in chunks(data):
            yield part

    for body in (io.BytesIO(data), parts()):
        async with session.post(f"{router.url}/v1/completions", data=body) as response:
            assert response.status == 200
        assert engine.received.pop().body == data


async def test_answers_pass_as_they_are(world: RouterWorld, session: aiohttp.ClientSession) -> None:
    (engine,) = await world.add(1)
    router = await world.router()
    for status in (200, 201, 400, 401, 404, 422, 429, 500, 502, 503, 504):
        body = f'{{"error": "{status}"\n}}'.encode()
        sent = {"Server": "uvicorn", "X-Request-Id": "r", "Retry-After": "7", "Date": "x"}

        def reply(_: web.Request, status: int = status, body: bytes = body) -> web.Response:
            return web.Response(status=status, body=body, headers=sent)  # noqa: B023

        engine.reply = reply
        async with session.get(f"{router.url}/v1/models") as response:
            assert (response.status, await response.read()) == (status, body)
            assert {name: response.headers.get(name) for name in sent} == sent
            assert not [name for name in response.headers if "envoy" in name.lower()]


async def test_a_frame_arrives_before_the_next_one_is_made(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    hold = asyncio.Event()
    await world.add(1, hold=hold)
    router = await world.router()
    async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
        assert await response.content.readline() == b"data: one\n"
        hold.set()
        assert (await response.content.read()).endswith(b"data: two\n\n")


async def test_a_client_that_waits_for_100_continue_gets_it(world: RouterWorld) -> None:
    (engine,) = await world.add(1)
    router = await world.router()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    assert (await reader.readline()).split()[1] == b"100"
    writer.write(b"{}")
    assert (await reader.readuntil(b"200 OK")).endswith(b"200 OK")
    assert engine.received.pop().body == b"{}"
    writer.close()


async def test_a_client_that_hangs_up_ends_the_work(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    (engine,) = await world.add(1, hold=asyncio.Event())
    router = await world.router()
    async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
        await response.content.readline()
        response.close()
    await engine.until(lambda: engine.cancelled == 1)


def port_of(router: Router) -> int:
    return int(router.url.rpartition(":")[2])
