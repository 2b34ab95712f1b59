"""What a watch of the gateway passes on, and when it counts as known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from fleetkeeper_gateway.keys.watched import SECRETS
from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.kubernetes.watch import ObjectName, Watch
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials, NoCredentials
from tests.support.guards import GUARD_S
from tests.support.plane.api_proxy import failure
from tests.support.plane.list_watch_server import serving, thing
from tests.support.plane.loopback_api import answering


class Copy:
    """A sink that keeps the objects, and counts what it was given."""

    def __init__(self) -> None:
        self.objects: dict[str, Mapping[str, Any]] = {}
        self.puts = 0
        self.lists = 0
        self._changed = asyncio.Event()

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        self.objects[place[1]] = found
        self.puts += 1
        self._changed.set()

    def remove(self, place: ObjectName) -> None:
        del self.objects[place[1]]
        self._changed.set()

    def listed(self) -> None:
        self.lists += 1
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the copy is as wanted."""
        async with asyncio.timeout(GUARD_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def watching(
    credentials: Credentials, *, namespaces: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Copy, Watch]]:
    copy = Copy()
    async with KubernetesClient(credentials) as client:
        watch = Watch(client, SECRETS, copy, namespaces=namespaces)
        task = asyncio.create_task(watch.run())
        try:
            yield copy, watch
            assert not task.done(), "nothing that a server sends ends the watch"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_a_new_list_removes_what_is_gone_and_repeats_nothing() -> None:
    async with serving("1", "2", "3") as server, watching(server.credentials) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        assert watch.synced
        await server.remove("2", silently=True)
        await server.put(thing("3", data="new"))
        await copy.until(lambda: copy.puts == 4)
        await server.send({"type": "ERROR", "object": failure(410, "Expired")})
        await copy.until(lambda: copy.objects.keys() == {"1", "3"})
        assert copy.puts == 4


async def test_a_namespace_that_may_not_be_read_keeps_no_other_waiting() -> None:
    async with serving("1") as server:
        server.denied_namespace = "b"
        async with watching(server.credentials, namespaces=("a", "b")) as (copy, watch):
            await server.until(lambda: watch.synced)
            assert copy.objects.keys() == {"1"}
            assert watch.last_contact is None, "of one namespace nothing is known"


async def test_a_list_that_fails_for_a_moment_is_waited_for() -> None:
    async with serving("1") as server:
        server.list_status = 503
        async with watching(server.credentials, namespaces=("a",)) as (copy, watch):
            await server.until(lambda: watch.failures >= 2)
            assert not watch.synced
            server.list_status = 200
            await copy.until(lambda: copy.lists == 1)
            assert watch.synced


async def test_a_failure_is_logged_once_and_so_is_its_end() -> None:
    with capture_logs() as logs:
        async with serving("1") as server:
            server.list_status = 503
            async with watching(server.credentials) as (copy, watch):
                await server.until(lambda: watch.failures >= 3)
                server.list_status = 200
                await copy.until(lambda: copy.lists == 1)
    assert [entry["event"] for entry in logs] == ["watch failed; retrying", "watch restored"]


async def test_an_object_that_cannot_be_decoded_or_named_hides_no_other() -> None:
    """Its author may nest managedFields deeper than Python decodes, or leave out what names it."""
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    items = [
        f'{{"metadata":{{"name":"{name}","namespace":"a","uid":"u","resourceVersion":"5",'
        f'"labels":{{"k":"v"}}}},"data":{data}}}'
        for name, data in (("first", 1), ("deep", deep), ("last", 1))
    ]
    items.append('{"metadata":{"name":{}}}')

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return web.json_response({})
        start = int(request.query.get("continue") or 0)
        end = start + int(request.query["limit"])
        following = f',"continue":"{end}"' if end < len(items) else ""
        text = (
            f'{{"metadata":{{"resourceVersion":"70"{following}}},'
            f'"items":[{",".join(items[start:end])}]}}'
        )
        return web.Response(text=text, content_type="application/json")

    async with answering(handler) as credentials, watching(credentials) as (copy, watch):
        await copy.until(lambda: copy.objects.keys() == {"first", "deep", "last"})
        assert "data" not in copy.objects["deep"]
        async with asyncio.timeout(GUARD_S):
            await watch.reflectors[0].synced.wait()


def test_outside_a_pod_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCredentials, match="FLEETKEEPER_GATEWAY_KUBECONFIG"):
        load_credentials(None)
