"""Raw bytes on a client's connection: smuggling, slow and endless heads, bodies and readers."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest
from aiohttp import web

from fleetkeeper_gateway.interfaces import Key
from tests.gateway.http.world import AUTHORIZATION, CHAT, KEY, World, chat, head
from tests.support.guards import GUARD_S

BODY = chat()
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.promise("grant-identity", "strict-parser")
@pytest.mark.parametrize(
    "lines",
    [
        (LENGTH, "Content-Length: 5"),
        (LENGTH, LENGTH),
        (LENGTH, "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", LENGTH),
        ("Content-Length: +5",),
        ("Content-Length: 5, 5",),
        ("Content-Length: 0x5",),
        ("Content-Length: -1",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked", LENGTH),
        (LENGTH, "X Name: 1"),
        (LENGTH, " Folded: 1"),
        (LENGTH, "X-Fleetkeeper-Service : team/chat"),
        (LENGTH, "X-Name: a\x00b"),
        (LENGTH, "X-Name: a\rX-Other: b"),
        (LENGTH, f"Authorization: {AUTHORIZATION}"),
        (LENGTH, "Authorization: Bearer other"),
        (LENGTH, "X-Inference-Tier: batch", "x-inference-tier: standard"),
        (LENGTH, "X-Fleetkeeper-Service: team/chat", "X-Fleetkeeper-Service: team/chat"),
        (LENGTH, "Content-Type: application/json", "Content-Type: text/plain"),
        (LENGTH, "Host: other"),
        (LENGTH, *(f"X-{number}: 1" for number in range(200))),
    ],
)
async def test_a_head_that_two_readers_could_understand_differently_is_refused(
    world: World, lines: tuple[str, ...]
) -> None:
    assert await world.raw_status(head(*lines) + BODY) == 400
    assert world.upstream.received == []


@pytest.mark.promise("strict-parser")
async def test_a_body_cannot_hide_a_second_request(world: World) -> None:
    hidden = head("Content-Length: 0", path="/v1/models")
    body = chat(x=hidden.decode())
    reader, writer = await world.raw(head(f"Content-Length: {len(body)}") + body)
    assert b" 200 " in await reader.readline()
    await reader.readuntil(b'{"ok": true}')
    writer.close()
    assert len(world.upstream.received) == 1


async def test_trailers_of_a_body_are_no_headers(world: World) -> None:
    """A proxy that checks headers may pass trailers on unchecked."""
    chunked = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    trailers = b"X-Inference-Tier: batch\r\nX-Request-Id: theirs\r\nX-Other: 1\r\n\r\n"
    lines = ("Transfer-Encoding: chunked", "Trailer: X-Other")
    assert await world.raw_status(head(*lines) + chunked + trailers) == 200
    (received,) = world.upstream.received
    assert received.values("x-inference-tier") == ["standard"]
    assert received.values("x-client-request-id") == []
    assert received.values("x-other") == []


async def test_requests_on_one_connection_are_answered_in_order(world: World) -> None:
    one = head(f"Content-Length: {len(BODY)}") + BODY
    reader, writer = await world.raw(one + one + head("Content-Length: 0", path="/nowhere"))
    async with asyncio.timeout(GUARD_S):
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'{"ok": true}')
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'{"ok": true}')
        assert b" 404 " in await reader.readline()
    writer.close()


async def test_a_client_that_hangs_up_with_a_request_in_the_queue_leaves_no_error(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    world.upstream.script = script
    one = head(LENGTH) + BODY
    _, writer = await world.raw(one + one)
    async with asyncio.timeout(GUARD_S):
        await begun.wait()
        writer.close()
        await world.upstream.gone.wait()
    await world.until(lambda: world.gateway.open_requests.count == 0)
    assert [one["outcome"] for one in world.audit.requests] == ["client_gone"]
    assert [one.getMessage() for one in caplog.records if one.name.startswith("uvicorn")] == []


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (LENGTH, BODY),
        ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_an_upgrade_is_ignored(world: World, framing: str, body: bytes, apart: bool) -> None:
    """As HTTP/1.1 allows. Some clients ask for h2c in their first request."""
    lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    first = head(framing, *lines)
    reader, writer = await world.raw(first if apart else first + body)
    async with asyncio.timeout(GUARD_S):
        if apart:
            await world.until(lambda: world.gateway.open_requests.count == 1)
            writer.write(body)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'{"ok": true}')
        writer.write(head(LENGTH) + BODY)
        assert b" 200 " in await reader.readline()
    writer.close()
    assert [one.body for one in world.upstream.received] == [BODY, BODY]
    assert world.upstream.received[0].values("http2-settings") == []
    assert world.upstream.received[0].values("upgrade") == []


async def test_a_client_that_waits_for_100_continue_gets_it(world: World) -> None:
    reader, writer = await world.raw(head(LENGTH, "Expect: 100-continue"))
    async with asyncio.timeout(GUARD_S):
        assert b" 100 " in await reader.readline()
        writer.write(BODY)
        await reader.readline()
        assert b" 200 " in await reader.readline()
    writer.close()


async def test_a_client_that_waits_for_100_continue_is_refused_before_its_body(
    world: World,
) -> None:
    lines = (f"Content-Length: {10**9}", "Expect: 100-continue")
    assert await world.raw_status(head(*lines)) == 413


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /v1/chat/comp",
        b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    ],
)
async def test_a_head_that_does_not_come_ends_the_connection(
    idle_world: World, data: bytes
) -> None:
    async with idle_world.running(client_timeout_seconds=0.2) as world:
        assert await world.raw_status(data) is None


@pytest.mark.parametrize(
    "endless",
    [
        head()[:-2] + b"X-Long: ",
        b"POST /",
        head("Transfer-Encoding: chunked") + b"0\r\nX-Trailer: ",
        head("Transfer-Encoding: chunked") + b"1;",
    ],
)
async def test_a_head_without_end_is_refused(world: World, endless: bytes) -> None:
    reader, writer = await world.raw(endless)

    async def feed() -> None:
        while True:
            writer.write(b"a" * 10_000)
            await writer.drain()

    feeding = asyncio.create_task(feed())
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait({feeding, asyncio.ensure_future(reader.read())})
    feeding.cancel()
    assert isinstance(feeding.exception(), ConnectionError)
    writer.close()


@pytest.mark.promise("body-budget")
async def test_a_body_above_the_limit_is_refused_by_its_announcement(world: World) -> None:
    assert await world.raw_status(head(f"Content-Length: {10**9}") + b"{") == 413
    assert world.gateway.bodies.held_bytes == 0


async def test_a_body_without_an_announced_end_takes_no_memory(world: World) -> None:
    """A gigabyte in chunks: refused at the limit, and the rest is not kept."""
    process = psutil.Process()
    before = process.memory_info().rss
    reader, writer = await world.raw(head("Transfer-Encoding: chunked"))
    answered = asyncio.create_task(reader.readline())
    chunk = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    highest = 0
    try:
        for _ in range(1024):
            writer.write(chunk)
            await writer.drain()
            highest = max(highest, process.memory_info().rss)
    except ConnectionError:
        pass
    async with asyncio.timeout(GUARD_S):
        assert b" 413 " in await answered
    writer.close()
    assert highest - before < 120 * 2**20
    await world.until(lambda: world.gateway.bodies.held_bytes == 0)


async def test_a_refused_client_reads_why_while_it_still_sends(world: World) -> None:
    size = 30_000_000
    reader, writer = await world.raw(head(f"Content-Length: {size}", key="Bearer other"))
    async with asyncio.timeout(GUARD_S):
        for _ in range(size // 100_000):
            writer.write(b" " * 100_000)
            await writer.drain()
        assert b" 401 " in await reader.readline()
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_the_slow_uploads_of_a_tenant_leave_room_for_others(idle_world: World) -> None:
    idle_world.keys.known["Bearer second"] = Key("key-2", "second", KEY.namespaces)
    others = frozenset({"team", "others"})
    idle_world.keys.known["Bearer other"] = Key("key-3", "other", others)
    async with idle_world.running(body_budget_bytes=200_000, request_bytes=90_000) as world:
        reader, writer = await world.raw(head("Content-Length: 80000") + b"{" + b" " * 70_000)
        await world.until(lambda: world.gateway.bodies.held_bytes > 70_000)
        for own in (AUTHORIZATION, "Bearer second"):
            async with world.post(chat(x="y" * 40_000), Authorization=own) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (503, "bodies_full")
                assert response.headers["Retry-After"] == "1"
        for authorization, size in ((AUTHORIZATION, 1), ("Bearer other", 40_000)):
            async with world.post(chat(x="y" * size), Authorization=authorization) as response:
                assert response.status == 200
        writer.close()
        await world.until(lambda: world.gateway.bodies.held_bytes == 0)
        async with world.post(chat(x="y" * 40_000)) as response:
            assert response.status == 200
        del reader


async def test_a_body_is_not_kept_while_its_answer_is_generated(world: World) -> None:
    proceed = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await proceed.wait()
        return response

    world.upstream.script = script
    async with world.post(chat(x="y" * 50_000)) as response:
        assert world.gateway.bodies.held_bytes == 0
        proceed.set()
        await response.read()


@pytest.mark.promise("body-budget")
async def test_a_slow_body_is_refused(idle_world: World) -> None:
    async with idle_world.running(client_timeout_seconds=0.3) as world:
        reader, writer = await world.raw(head(LENGTH) + BODY[:-1])
        async with asyncio.timeout(GUARD_S):
            assert b" 408 " in await reader.readline()
            answered = await reader.read()
        writer.close()
        assert json.loads(answered.split(b"\r\n\r\n")[1])["error"]["code"] == "body_too_slow"
        assert world.limiter.admissions == []


@pytest.mark.promise("body-budget")
async def test_a_reader_that_stops_is_cut_off_and_takes_no_memory(idle_world: World) -> None:
    sent = 0

    async def script(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    idle_world.upstream.script = script
    async with idle_world.running(client_timeout_seconds=0.5) as world:
        before = psutil.Process().memory_info().rss
        _, writer = await world.raw(head(LENGTH) + BODY)
        async with asyncio.timeout(GUARD_S):
            await world.upstream.gone.wait()
        # The sockets of loopback hold some megabytes; the processes hold little.
        assert psutil.Process().memory_info().rss - before < 40 * 2**20
        await world.until(lambda: len(world.audit.requests) == 1)
        assert world.audit.requests[0]["outcome"] == "slow_reader"
        assert sent < 64 * 2**20
        writer.close()


async def test_a_reader_that_is_slow_but_reads_gets_all(idle_world: World) -> None:
    size = 8 * 2**20

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * size)

    idle_world.upstream.script = script
    async with idle_world.running(client_timeout_seconds=5) as world:
        reader, writer = await world.raw(head(LENGTH, "Connection: close") + BODY)
        await reader.readuntil(b"\r\n\r\n")
        left = size
        async with asyncio.timeout(GUARD_S):
            while left:
                part = await reader.read(2**20)
                assert part
                left -= len(part)
                await asyncio.sleep(0.12)
        writer.close()
        assert world.upstream.received[0].path == CHAT


async def test_bytes_that_are_no_request_do_not_mix_with_an_answer(world: World) -> None:
    proceed = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"first")
        await proceed.wait()
        return response

    world.upstream.script = script
    reader, writer = await world.raw(head(LENGTH) + BODY)
    async with asyncio.timeout(GUARD_S):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no request\r\n\r\n")
        answered = b""
        try:
            while part := await reader.read(1000):
                answered += part
        except ConnectionError:
            pass
        await world.upstream.gone.wait()
    proceed.set()
    writer.close()
    assert answered in (b"", b"first")


async def test_a_body_in_many_small_parts_takes_little_memory(world: World) -> None:
    body = chat(x="y" * 100_000)
    reader, writer = await world.raw(head("Transfer-Encoding: chunked"))
    for start in range(0, len(body), 7):
        part = body[start : start + 7]
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        if start % 700 == 0:
            await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")
    async with asyncio.timeout(GUARD_S):
        assert b" 200 " in await reader.readline()
    writer.close()
    assert world.upstream.received[0].body == body
