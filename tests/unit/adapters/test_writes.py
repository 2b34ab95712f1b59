"""What the operator writes, and what each write passes."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.adapters.kubernetes.writes import (
    ADDRESSES_IN_FLIGHT,
    KubernetesWriter,
    Write,
    WritePoint,
)
from fleetkeeper.reconcile.types import Kind
from tests.support.plane.loopback_api import served


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
