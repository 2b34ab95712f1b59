"""What a service receives, and what its client gets back."""

from __future__ import annotations

import asyncio
import gzip
import os

import aiohttp
import pytest
import structlog.testing
from aiohttp import web

from fleetkeeper_gateway.http.paths import INFERENCE, SENT_AS
from tests.gateway.http.world import AUTHORIZATION, CHAT, PROMPT, SECRET, World, chat, head, service
from tests.support.guards import GUARD_S

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_body_reaches_the_service_byte_for_byte(world: World) -> None:
    body = b'{ "model":"m",  "unknown" : {"a": [1, 2.50, "\xc3\xa9"]}, "n":1 }\n'
    async with world.post(body, CHAT + "?x=%2f&y") as response:
        assert response.status == 200
    (received,) = world.upstream.received
    assert (received.path, received.body) == (CHAT + "?x=%2f&y", body)


@pytest.mark.parametrize("path", sorted(INFERENCE))
async def test_every_inference_path_is_passed_on(world: World, path: str) -> None:
    async with world.post(path=path) as response:
        assert response.status == 200
    assert [one.path for one in world.upstream.received] == [SENT_AS.get(path, path)]


async def test_a_large_body_reaches_the_service_byte_for_byte(world: World) -> None:
    body = chat(messages=[{"role": "user", "content": os.urandom(2_000_000).hex()}])
    async with world.post(body) as response:
        assert response.status == 200
    assert world.upstream.received[0].body == body
    assert world.gateway.bodies.held_bytes == 0


async def test_a_stream_is_passed_on_byte_for_byte(world: World) -> None:
    frames = [b"data: " + os.urandom(40).hex().encode() + b"\n\n" for _ in range(200)]

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
        return response

    world.upstream.script = script
    async with world.post() as response:
        assert await response.read() == b"".join(frames)
        assert response.headers["Content-Type"] == "text/event-stream"


async def test_each_frame_is_passed_on_before_the_next_exists(world: World) -> None:
    read = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(5):
            await response.write(b"frame %d" % number)
            await read.wait()
            read.clear()
        return response

    world.upstream.script = script
    async with world.post() as response:
        for number in range(5):
            assert await response.content.readany() == b"frame %d" % number
            read.set()
        assert await response.content.readany() == b""


async def test_a_compressed_answer_stays_compressed(world: World) -> None:
    packed = gzip.compress(b"answer" * 100)

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    world.upstream.script = script
    async with world.post(Accept_Encoding="gzip") as response:
        assert await response.read() == packed
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["Content-Length"] == str(len(packed))


@pytest.mark.promise("service-headers")
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_answer_of_the_service_is_passed_on_whatever_it_says(
    world: World, status: int
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        headers = {"X-Fleetkeeper-Refused": "rate_limit_exceeded", "Retry-After": "7"}
        return web.Response(status=status, text="no", headers=headers)

    world.upstream.script = script
    async with world.post() as response:
        assert (response.status, await response.text()) == (status, "no")
        assert response.headers["Retry-After"] == "7"
        assert "X-Fleetkeeper-Refused" not in response.headers, "the gateway refused nothing"
    assert len(world.upstream.received) == 1


@pytest.mark.promise("service-headers")
async def test_a_service_sets_nothing_for_the_host_that_all_services_share(world: World) -> None:
    passed_on = {"Content-Type": "text/plain", "OpenAI-Processing-Ms": "17"}
    dropped = {
        "Set-Cookie": "a=1",
        "Alt-Svc": 'h3=":443"',
        "Clear-Site-Data": '"*"',
        "Strict-Transport-Security": "max-age=0",
        "Access-Control-Allow-Origin": "*",
        "Content-Security-Policy": "default-src *",
        "Refresh": "0; url=https://elsewhere",
        "Location": "/elsewhere",
        "WWW-Authenticate": "Basic",
        "X-RateLimit-Limit-Tokens": "1",
        "Server": "engine",
        "X-Unknown": "1",
    }

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok", headers={**passed_on, **dropped})

    world.upstream.script = script
    async with world.post() as response:
        own = {"X-Request-Id", "x-ratelimit-limit-requests", "Content-Length"}
        names = {name.lower() for name in response.headers}
        assert names == {name.lower() for name in (*passed_on, *own)}
        assert response.headers["OpenAI-Processing-Ms"] == "17"


@pytest.mark.promise("service-headers")
@pytest.mark.parametrize("status", [301, 304, 307, 799])
async def test_a_redirect_of_a_service_is_its_failure(world: World, status: int) -> None:
    """OpenAI's client follows redirects, with the prompt and the key."""

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": "http://elsewhere"})

    world.upstream.script = script
    assert await world.refused() == (502, "upstream_failed")
    assert world.limiter.admissions[0].released == [True]


@pytest.mark.promise("client-keys-stay", "grant-identity")
async def test_headers_of_the_client_that_the_service_must_not_see_are_dropped(
    world: World,
) -> None:
    secret = {
        "Cookie": SECRET,
        "X-Api-Key": SECRET,
        "Api-Key": SECRET,
        "Proxy-Authorization": SECRET,
        "X-Fleetkeeper-Internal": SECRET,
        "X_Fleetkeeper_Internal": SECRET,
        "X-vllm-Priority": SECRET,
        "X-Forwarded-For": SECRET,
        "Forwarded": SECRET,
        "X-Real-Ip": SECRET,
        "TE": SECRET,
        "X-Data-Parallel-Rank": SECRET,
        "Upgrade-Insecure": "kept",
        "Named": SECRET,
        "Connection": "keep-alive, Named",
    }
    async with world.client.post(
        world.url(CHAT), data=chat(), headers={"Authorization": AUTHORIZATION, **secret}
    ) as response:
        assert response.status == 200
    received = world.upstream.received[0]
    assert SECRET not in str(received.headers)
    assert received.values("upgrade-insecure") == ["kept"]
    assert received.values("x-inference-tier") == ["standard"]


async def test_trace_context_and_baggage_are_passed_on(world: World) -> None:
    world.grants.error = RuntimeError("no key")
    async with world.post(
        traceparent=TRACE, tracestate="a=1", baggage="user=7, fleetkeeper-grant=stolen;x, b=2"
    ) as response:
        assert response.status == 200
    received = world.upstream.received[0]
    assert received.values("traceparent") == [TRACE]
    assert received.values("tracestate") == ["a=1"]
    assert received.values("baggage") == ["user=7,b=2"]


async def test_a_request_gets_an_id_of_ours_beside_the_clients(world: World) -> None:
    async with world.post(X_Request_Id="theirs") as response:
        own = response.headers["X-Request-Id"]
        assert response.headers["X-Client-Request-Id"] == "theirs"
    received = world.upstream.received[0]
    assert received.values("x-request-id") == [own]
    assert received.values("x-client-request-id") == ["theirs"]
    assert own != "theirs"
    assert world.audit.requests[0]["request_id"] == own
    assert world.limiter.admissions[0].demand.request_id == own


async def test_the_services_own_request_id_does_not_come_beside_ours(world: World) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"X-Request-Id": "upstream"})

    world.upstream.script = script
    async with world.post() as response:
        assert response.headers.getall("X-Request-Id") == [
            world.upstream.received[0].values("x-request-id")[0]
        ]


async def test_a_service_that_demands_grants_gets_one_in_both_places(world: World) -> None:
    world.services.set(service(url=world.upstream.url, demands_grant=True))
    async with world.post(baggage="user=7") as response:
        assert response.status == 200
    received = world.upstream.received[0]
    (claims,) = world.grants.signed
    grant = f"hops-1:{claims['attempt_id']}"
    assert received.values("authorization") == [f"Bearer {grant}"]
    assert received.values("baggage") == [f"user=7,fleetkeeper-grant={grant}"]
    assert claims["service"] == "uid-chat"
    assert claims["key_id"] == "key-1"
    assert claims["request_id"] == received.values("x-request-id")[0]


async def test_an_open_service_gets_a_grant_too_if_there_is_a_key(world: World) -> None:
    """It may have demanded one a moment ago, and its engine counts usage by key."""
    async with world.post() as response:
        assert response.status == 200
    (claims,) = world.grants.signed
    received = world.upstream.received[0]
    assert received.values("authorization") == [f"Bearer hops-1:{claims['attempt_id']}"]


async def test_an_open_service_is_served_without_a_grant_key(world: World) -> None:
    world.grants.error = RuntimeError("no key")
    async with world.post() as response:
        assert response.status == 200
    received = world.upstream.received[0]
    assert received.values("authorization") == []
    assert received.values("baggage") == []


async def test_a_rerank_request_takes_the_path_on_which_the_router_keeps_the_model(
    world: World,
) -> None:
    async with world.post(path="/v1/rerank") as response:
        assert response.status == 200
    assert world.upstream.received[0].path == "/rerank"


async def test_a_request_ends_for_its_limits_before_the_client_has_its_end(world: World) -> None:
    """A client whose concurrency is 1 may send its next request at once."""
    world.limiter.may_release = asyncio.Event()
    async with world.post() as response:
        reading = asyncio.create_task(response.read())
        await world.until(lambda: world.limiter.admissions[0].released == [True])
        done, _ = await asyncio.wait({reading}, timeout=1.0)
        assert not done
        world.limiter.may_release.set()
        async with asyncio.timeout(GUARD_S):
            await reading


@pytest.mark.promise("gateway-hops")
async def test_a_request_that_goes_round_in_a_circle_ends(world: World) -> None:
    world.services.set(service(url=world.upstream.url, demands_grant=True))
    async with world.post(baggage="fleetkeeper-grant=hops-2:x") as response:
        assert response.status == 200
    assert world.grants.signed[0]["hops"] == 3
    assert await world.refused(baggage="fleetkeeper-grant=hops-3:x") == (508, "loop_detected")
    assert len(world.upstream.received) == 1


async def test_without_a_grant_key_a_service_that_demands_grants_is_unavailable(
    world: World,
) -> None:
    world.services.set(service(url=world.upstream.url, demands_grant=True))
    world.grants.error = RuntimeError("no key")
    assert await world.refused() == (503, "grants_unavailable")
    assert world.limiter.admissions[0].released == [False]


async def test_a_client_that_hangs_up_during_a_stream_ends_the_request_upstream(
    world: World,
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await asyncio.Event().wait()
        return response

    world.upstream.script = script
    async with world.post() as response:
        assert await response.content.readany() == b"first"
        response.close()
        async with asyncio.timeout(GUARD_S):
            await world.upstream.gone.wait()
    await world.until(lambda: world.limiter.admissions[0].released == [True])
    assert world.audit.requests[0]["outcome"] == "client_gone"
    assert world.limiter.admissions[0].least == 0, "the engine counted its prompt"


@pytest.mark.parametrize("size", [1, 100_000, 1_000_000])
async def test_a_client_that_hangs_up_before_the_answer_ends_the_request_upstream(
    world: World, size: int
) -> None:
    begun = asyncio.Event()
    body = chat(x="y" * size)

    async def script(request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    world.upstream.script = script
    _, writer = await world.raw(head(f"Content-Length: {len(body)}"))
    # The body comes all at once, while the gateway waits for it.
    await world.until(lambda: world.gateway.open_requests.count == 1)
    writer.write(body)
    async with asyncio.timeout(GUARD_S):
        await begun.wait()
        writer.close()
        await world.upstream.gone.wait()
    await world.until(lambda: world.gateway.open_requests.count == 0)
    # It may have been worked on, so its tokens are not given back, and its prompt is never free.
    await world.until(lambda: world.limiter.admissions[0].released == [True])
    assert world.limiter.admissions[0].least == len(body) // 4


@pytest.mark.parametrize("length", [True, False])
async def test_a_service_that_dies_during_its_answer_makes_a_visible_abort(
    world: World, length: bool
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"} if length else {})
        await response.prepare(request)
        await response.write(b"first")
        assert request.transport is not None
        request.transport.close()
        return response

    world.upstream.script = script
    async with world.post() as response:
        assert await response.content.readany() == b"first"
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    await world.until(lambda: len(world.audit.requests) == 1)
    assert world.audit.requests[0]["outcome"] == "upstream_lost"


async def test_a_service_that_dies_before_its_answer_is_not_asked_again(world: World) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        raise ConnectionError

    world.upstream.script = script
    assert await world.refused() == (502, "upstream_failed")
    assert len(world.upstream.received) == 1
    assert world.limiter.admissions[0].released == [True]
    assert world.limiter.admissions[0].least == 0, "it was not the client who ended it"


async def test_limits_are_told_in_headers(world: World) -> None:
    async with world.post(chat(max_tokens=10, n=3)) as response:
        assert response.headers["x-ratelimit-limit-requests"] == "7"
    admission = world.limiter.admissions[0]
    assert admission.demand.tokens == len(chat(max_tokens=10, n=3)) // 4 + 30
    assert admission.demand.key.id == "key-1"
    assert admission.released == [True]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX-Name : a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"not HTTP at all\r\n\r\n",
        b"",
    ],
)
async def test_an_answer_that_is_no_http_fails_visibly(world: World, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"the-prompt-of-the-test")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        world.services.set(service(url=f"http://127.0.0.1:{port}"))
        assert await world.refused() == (502, "upstream_failed")


async def test_a_failure_of_the_gateway_itself_gives_everything_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(world.audit, "request", broken)
    async with world.post() as response:
        assert response.status == 200
    await world.until(lambda: world.limiter.admissions[0].released == [True])
    assert world.gateway.open_requests.count == 0


async def test_a_request_that_fails_in_the_gateway_is_logged_without_its_content(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(demand: object) -> None:
        raise ValueError(PROMPT)

    monkeypatch.setattr(world.limiter, "admit", broken)
    with structlog.testing.capture_logs() as lines:
        assert await world.refused() == (500, "internal_error")
    (line,) = lines
    assert line["error"] == "ValueError"
    assert PROMPT not in str(line)
