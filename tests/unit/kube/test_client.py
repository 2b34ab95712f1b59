"""Requests against a server on loopback that does what no real API server can be made to do."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials
from fleetkeeper_kube.errors import ApiError, BrokenAnswer
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.pki import Authority
from tests.support.plane.loopback_api import served

THING = Resource("Thing", "things", "v1", "example.com")


async def test_429_is_tried_again_after_the_seconds_it_names() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        times.append(loop.time())
        if len(times) == 1:
            return web.Response(status=429, headers={"Retry-After": "1"})
        return web.json_response({"ok": True})

    async with served(handler) as client:
        assert await client.request("GET", "/x") == {"ok": True}
    assert len(times) == 2
    assert times[1] - times[0] >= 1.0


@pytest.mark.slow
async def test_429_without_end_is_given_up() -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=429, headers={"Retry-After": "0"})

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x")
    assert caught.value.status == 429
    assert count == 4


@pytest.mark.parametrize("code", [500, 503, 504])
async def test_a_server_error_is_the_callers_to_retry(code: int) -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=code)

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x")
    assert caught.value.status == code
    assert count == 1


async def test_a_connection_cut_before_the_answer_is_tried_once_more() -> None:
    """As a kept connection that the server had closed; a write may have happened the first time."""
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        if count == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"count": count})

    async with served(handler) as client:
        assert await client.request("PATCH", "/x", body={"a": 1}) == {"count": 2}


async def test_a_connection_cut_again_and_again_is_no_answer() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("PATCH", "/x", body={"a": 1})
    assert (caught.value.status, caught.value.is_transient) == (0, True)


async def test_no_answer_in_time_is_told_and_not_retried() -> None:
    count = 0
    given_up = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        await given_up.wait()
        return web.Response()

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x", timeout_s=0.2)
        given_up.set()
    assert (caught.value.status, caught.value.reason, count) == (0, "Timeout", 1)


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a":', b"[1]", b"\x00\xff"])
async def test_garbage_is_a_broken_answer(body: bytes) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with served(handler) as client:
        with pytest.raises(BrokenAnswer):
            await client.request("GET", "/x")


async def test_half_a_body_is_a_broken_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"a": 1')
        assert request.transport is not None
        request.transport.close()
        return response

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x")
    assert caught.value.status == 0


async def test_pages_follow_until_the_last() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.query["limit"] == "2"
        if "continue" not in request.query:
            return web.json_response({"metadata": {"continue": "c1"}, "items": [1, 2]})
        assert request.query["continue"] == "c1"
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [3]})

    async with served(handler) as client:
        pages = [page["items"] async for page in client.list_pages(THING, None, page_size=2)]
    assert pages == [[1, 2], [3]]


async def test_a_watch_gives_whole_lines_up_to_the_bound_of_an_answer() -> None:
    long = b'{"x":"' + b"y" * 1_900_000 + b'"}'

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"a":1}\n{"b"')
        await response.write(b":2}\n" + long + b"\n")
        return response

    async with (
        served(handler) as client,
        client.watch(THING, "a", resource_version="1", server_timeout_s=10) as lines,
    ):
        assert [line async for line in lines] == [b'{"a":1}', b'{"b":2}', long]


async def test_a_refused_watch_is_told() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "Expired", "code": 410}, status=410)

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            async with client.watch(THING, "a", resource_version="1", server_timeout_s=10):
                pass
    assert caught.value.is_expired


async def test_no_more_requests_than_slots_are_in_flight() -> None:
    now = peak = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response({})

    async with served(handler) as client:
        await asyncio.gather(*(client.request("GET", "/x") for _ in range(20)))
    assert peak == 8


async def test_a_redirect_is_not_followed() -> None:
    """Another server must not get the token."""
    paths: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x")
        with pytest.raises(ApiError):
            async with client.watch(THING, "a", resource_version="1", server_timeout_s=10):
                pass
    assert caught.value.status == 307
    assert paths == ["/x", THING.path("a")]


async def test_a_refusal_of_any_size_keeps_its_status() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=403, body=b"x" * 5_000_000)

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/x")
    assert (caught.value.status, caught.value.reason) == (403, "NotKubernetes")


async def test_credentials_that_cannot_be_read_are_a_failure_of_the_request(
    tmp_path: Path,
) -> None:
    """The kubelet may replace them at this moment; the caller tries again."""
    credentials = Credentials("http://127.0.0.1:1", token_file=tmp_path / "token")
    async with KubernetesClient(credentials) as client:
        with pytest.raises(ApiError, match="NoCredentials") as caught:
            await client.request("GET", "/x")
    assert caught.value.is_transient


async def test_a_request_that_is_cancelled_leaves_no_connection_to_a_server_that_is_gone(
    tmp_path: Path,
) -> None:
    """An orderly end of TLS waits for the server: half a minute, and beyond the end of the loop."""
    authority = Authority(tmp_path, "ca").ensure()
    issued = authority.issue("server", "api", hosts=("127.0.0.1",), server=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    asked = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        asked.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    credentials = Credentials(f"https://127.0.0.1:{port}", ca_file=authority.certificate)
    async with server:
        async with KubernetesClient(credentials) as client:
            request = asyncio.create_task(client.request("GET", "/x"))
            await asked.wait()
            request.cancel()
            await asyncio.wait([request])
        await asyncio.sleep(0)  # transports close their sockets one round later
        left = psutil.Process().net_connections("tcp")
        writers[0].transport.abort()
    assert [found for found in left if found.raddr and found.raddr.port == port] == []
