"""What the router answers itself is an error object of OpenAI's API, and says whether to send it again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fleetkeeper_gateway.upstream.not_sent import is_refusal
from fleetkeeper_router.settings import Policy
from tests.router.test_bytes import port_of
from tests.support.engine.router_world import FULL, Router, RouterWorld, post, until


async def refused(
    session: aiohttp.ClientSession, router: Router, **more: Any
) -> tuple[int, str, bytes]:
    """Send a request; return the status, the code and the body of its refusal."""
    url = f"{router.url}/v1/chat/completions"
    async with session.post(url, **{"data": b"{}", **more}) as response:
        body = await response.read()
        assert response.content_type == "application/json"
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] is None
        return response.status, error["code"], body


async def test_without_a_replica_that_is_ready(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """None exists, then one starts: the gateway sends it again in both cases."""
    router = await world.router()
    for _ in range(2):
        status, code, body = await refused(session, router)
        assert (status, code) == (503, "no_replica")
        assert is_refusal(status, body)
        await world.add(1, ready=False)


async def test_a_replica_that_does_not_listen_any_more(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Until its health is known, the request goes to another; without one, it was not sent."""
    gone, other = await world.add(2)
    router = await world.router(Policy.ROUND_ROBIN)
    await gone.stop()
    assert {await post(session, router) for _ in range(20)} == {other.address}
    await other.stop()
    assert (await refused(session, router))[:2] == (503, "no_replica")


@pytest.mark.parametrize("after", ["request", "headers"])
async def test_a_replica_that_ends_while_it_works(
    world: RouterWorld, session: aiohttp.ClientSession, after: str
) -> None:
    """It is not sent again. A stream that has begun is cut, because a clean end would look complete."""
    engines = await world.add(2, hold=asyncio.Event())

    def reset(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    router = await world.router()
    if after == "request":
        for engine in engines:
            engine.reply = reset
        status, code, body = await refused(session, router, headers={"X-Request-Id": "r-7"})
        assert (status, code, is_refusal(status, body)) == (502, "replica_failed", False)

        async def is_logged() -> bool:
            return '"request":"r-7"' in router.log.read_text()

        await until(is_logged)
        line = json.loads(router.log.read_text().splitlines()[-1])
        assert (line["status"], line["flags"], line["request"]) == (502, "UC", "r-7")
        assert line["engine"].startswith("127.1.0.")
    else:
        async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
            await response.content.readline()
            for engine in engines:
                await engine.stop()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
    assert sum(len(engine.received) for engine in engines) == 1


async def test_a_replica_that_sends_nothing_for_too_long(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(1, seconds=60.0)
    router = await world.router(request_timeout_seconds=0.5)
    assert (await refused(session, router))[:2] == (504, "timeout")


async def test_what_is_no_request(world: RouterWorld, session: aiohttp.ClientSession) -> None:
    await world.add(1)
    router = await world.router()
    headers = {f"X-{number}": "a" for number in range(101)}
    assert (await refused(session, router, headers=headers))[0] in {400, 431}
    for wrong, status in [
        (b"GARBAGE\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
    ]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router))
        writer.write(wrong)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["code"] == "bad_request"
        writer.close()


async def test_a_router_without_memory_refuses(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Before its pod has none: the request was not sent."""
    (engine,) = await world.add(1)
    router = await world.router(Policy.PREFIX_AWARE, memory_bytes=96 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    held = []

    async def is_full() -> bool:
        """Begin another long body, and ask whether a short request is taken."""
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(router))
        writer.write(head + bytes(900_000))
        held.append(writer)
        async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
            body = await response.read()
        return response.status == 503 and is_refusal(503, body)

    await until(is_full)
    print(f"{len(held)} bodies of 0.9 MB")
    assert len(held) > 40
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router))
        writer.write(head)
        assert (await reader.readline()).split()[1] == b"503"
        writer.close()
    for writer in held:
        writer.close()

    async def serves() -> bool:
        async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
            return response.status == 200

    await until(serves)
    assert router.process is not None
    assert router.process.returncode is None
    assert {len(one.body) for one in engine.received} == {2}


async def test_what_a_tier_sheds_is_not_sent_again(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """The share that all replicas admit is decided once for a request, not at each of them."""

    def shed(_request: web.Request) -> web.StreamResponse:
        headers = {"Retry-After": "1", "X-Envoy-RateLimited": "true"}
        return web.json_response(FULL, status=429, headers=headers)

    engines = await world.add(2, reply=shed)
    router = await world.router()
    for _ in range(10):
        async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "X-Envoy-RateLimited" not in response.headers, "a matter of ours"
    assert sum(len(engine.received) for engine in engines) == 10


async def test_a_full_service_says_so_in_the_engines_words(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(2, slots=0)
    router = await world.router()
    status, code, _ = await refused(session, router)
    assert (status, code) == (429, "queue_full")
