"""Requests against a server on loopback that does what no real API server can be told to do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from fleetkeeper.adapters.kubernetes.credentials import load_configuration
from fleetkeeper.adapters.kubernetes.errors import ApiError, BrokenAnswer
from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.adapters.kubernetes.resources import CHILDREN, INFERENCE_SERVICE
from fleetkeeper.adapters.kubernetes.writes import (
    ADDRESSES_IN_FLIGHT,
    KubernetesWriter,
    Write,
    WritePoint,
)
from fleetkeeper.reconcile.types import Kind
from tests.support.loopback_api import served


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


async def test_the_fence_is_asked_before_each_send() -> None:
    """Also before a retry: the lease may have run out while the server asked us to wait."""
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "0"})

    def fence() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise LeaseLost("too old")

    async with served(handler) as client:
        writer = KubernetesWriter(client, fence=fence)
        with pytest.raises(LeaseLost):
            await writer.apply_status("a", "chat", {}, uid="u1", resource_version="3")
    assert asked == 2


async def test_the_hook_sees_each_write_at_three_points() -> None:
    seen: list[tuple[WritePoint, Write]] = []
    bodies: list[object] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append((request.method, request.path_qs, await request.json()))
        return web.json_response({"metadata": {}})

    async with served(handler) as client:
        writer = KubernetesWriter(
            client, fence=lambda: None, hook=lambda point, write: seen.append((point, write))
        )
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"namespace": "a", "name": "chat-fk-control"},
        }
        await writer.apply_child(
            CHILDREN[Kind.CONFIG_MAP], manifest, force=False, resource_version="7"
        )
    write = Write("apply", "ConfigMap", "a", "chat-fk-control")
    assert seen == [(point, write) for point in WritePoint]
    (sent,) = bodies
    assert sent == (
        "PATCH",
        "/api/v1/namespaces/a/configmaps/chat-fk-control?fieldManager=fleetkeeper&force=false",
        {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "7"}},  # type: ignore[dict-item]
    )


async def test_a_delete_names_the_very_object_and_is_content_when_it_is_gone() -> None:
    bodies: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)

    async with served(handler) as client:
        writer = KubernetesWriter(client, fence=lambda: None)
        gone = await writer.delete(
            CHILDREN[Kind.SERVICE], "a", "chat", uid="u1", resource_version="9"
        )
    assert gone is False
    assert bodies[0]["preconditions"] == {"uid": "u1", "resourceVersion": "9"}


async def test_pages_follow_until_the_last() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.query["limit"] == "2"
        if "continue" not in request.query:
            return web.json_response({"metadata": {"continue": "c1"}, "items": [1, 2]})
        assert request.query["continue"] == "c1"
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [3]})

    async with served(handler) as client:
        pages = [
            page["items"] async for page in client.list_pages(INFERENCE_SERVICE, None, page_size=2)
        ]
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
        client.watch(INFERENCE_SERVICE, "a", resource_version="1", server_timeout_s=10) as lines,
    ):
        assert [line async for line in lines] == [b'{"a":1}', b'{"b":2}', long]


async def test_a_refused_watch_is_told() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "Expired", "code": 410}, status=410)

    async with served(handler) as client:
        with pytest.raises(ApiError) as caught:
            async with client.watch(
                INFERENCE_SERVICE, "a", resource_version="1", server_timeout_s=10
            ):
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


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "api.example"}, None),
        ({"http_proxy": "http://proxy:3128"}, None),
    ],
    ids=["none", "a proxy", "excepted", "another scheme"],
)
async def test_the_environment_is_asked_for_a_proxy_once_at_the_start(
    environment: dict[str, str],
    proxy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And never again: for each request it would cost two threads, and ~/.netrc could name a user."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "a",
                "clusters": [{"name": "a", "cluster": {"server": "https://api.example:6443"}}],
                "users": [{"name": "a", "user": {"token": "t"}}],
                "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            }
        )
    )
    configuration = await load_configuration(file)
    assert configuration.proxy == proxy
    assert configuration.client_session_kwargs == {"trust_env": False}


async def test_few_services_are_created_at_a_time() -> None:
    """Their addresses are allotted one by one: the others wait here, where no time-out runs."""
    under_way = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return web.json_response({"metadata": {"name": request.path.rpartition("/")[2]}})

    service = CHILDREN[Kind.SERVICE]
    async with served(handler) as client:
        writer = KubernetesWriter(client, fence=lambda: None)
        await asyncio.gather(
            *(
                writer.create_child(service, {"metadata": {"namespace": "a", "name": f"s{n}"}})
                for n in range(3 * ADDRESSES_IN_FLIGHT)
            )
        )
    assert most == ADDRESSES_IN_FLIGHT
