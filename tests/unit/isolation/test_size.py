"""The largest objects that a tenant can make cost the operator a bounded amount of memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper import events
from fleetkeeper.adapters.kubernetes.records import Unread, observe
from fleetkeeper.adapters.kubernetes.reflector import watch_managed
from fleetkeeper.adapters.kubernetes.resources import CHILDREN, EVENT
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.service_entry import LARGEST_SPEC_BYTES
from fleetkeeper_kube.bounds import ANSWER_BYTES, FIRST_PAGE, decoded_event, next_limit
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import BrokenAnswer, NotTaken
from fleetkeeper_kube.reading import UNREAD
from tests.support.plane.loopback_api import served

CONFIG_MAP = CHILDREN[Kind.CONFIG_MAP]
Live = dict[str, Any]


class Server:
    """ConfigMaps of given sizes in pages, written as the API server writes them."""

    def __init__(self, *sizes: int, bodies: dict[int, str] | None = None) -> None:
        self.sizes = sizes
        self.bodies = bodies or {}
        self.asked: list[tuple[int, int]] = []
        self.watched = asyncio.Event()
        self.ended = asyncio.Event()

    def item(self, number: int) -> str:
        meta = (
            f'"metadata":{{"name":"x{number}","namespace":"a","uid":"u{number}",'
            f'"resourceVersion":"{number + 1}","creationTimestamp":"t",'
            '"labels":{"app.kubernetes.io/managed-by":"fleetkeeper","fleetkeeper.io/service":"chat"}'
        )
        data = self.bodies.get(number, f'"{"y" * self.sizes[number]}"')
        return f'{{{meta}}},"data":{{"k":{data}}}}}'

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            self.watched.set()
            await self.ended.wait()
            return response
        limit, start = int(request.query["limit"]), int(request.query.get("continue") or 0)
        self.asked.append((start, limit))
        end = min(start + limit, len(self.sizes))
        following = f',"continue":"{end}","remainingItemCount":9' if end < len(self.sizes) else ""
        body = (
            '{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"70"'
            f'{following}}},"items":[{",".join(map(self.item, range(start, end)))}]}}'
        )
        return web.Response(text=body, content_type="application/json")


async def names(pages: AsyncIterator[Live]) -> list[tuple[str, bool]]:
    return [
        (live["metadata"]["name"], UNREAD in live) async for page in pages for live in page["items"]
    ]


async def listed(client: KubernetesClient) -> list[tuple[str, bool]]:
    return await names(client.list_pages(CONFIG_MAP, "a"))


async def test_pages_of_small_objects_grow_to_what_is_asked_for() -> None:
    server = Server(*[100] * 500)
    async with served(server.answer) as client:
        assert len(await listed(client)) == 500
    assert [limit for _, limit in server.asked] == [FIRST_PAGE, 80, 200, 200, 200][
        : len(server.asked)
    ]


async def test_a_page_that_is_too_large_is_asked_for_again_with_fewer_objects() -> None:
    """200 objects of a megabyte are read two at a time at most, and each of them once."""
    server = Server(*[1_000_000] * 40)
    async with served(server.answer) as client:
        assert await listed(client) == [(f"x{number}", False) for number in range(40)]
    taken = [limit for _, limit in server.asked if limit <= ANSWER_BYTES // 1_000_000]
    assert len(taken) >= 40 // 2
    assert len(server.asked) <= 44


async def test_an_object_beyond_the_bound_is_named_and_the_others_are_read() -> None:
    server = Server(100, 100, ANSWER_BYTES, 100, 100)
    async with served(server.answer) as client:
        found = await listed(client)
    assert found == [("x0", False), ("x1", False), ("x2", True), ("x3", False), ("x4", False)]


@pytest.mark.parametrize("body", ['{"a":' * 5000 + "1" + "}" * 5000, "1" * 5000])
async def test_an_object_that_cannot_be_decoded_is_named_and_the_others_are_read(body: str) -> None:
    server = Server(100, 100, 100, bodies={1: body})
    async with served(server.answer) as client:
        assert await listed(client) == [("x0", False), ("x1", True), ("x2", False)]


async def test_a_list_that_is_no_list_of_objects_fails() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="[" * 5000)

    async with served(handler) as client:
        with pytest.raises(NotTaken):
            await listed(client)
        with pytest.raises(NotTaken):
            await client.request("GET", "/version")


async def test_a_single_object_beyond_the_bound_is_there_and_unreadable() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text='{"a":"' + "y" * ANSWER_BYTES + '"}')

    async with served(handler) as client:
        live = await client.read(CONFIG_MAP, "a", "x")
    assert live is not None
    found = observe("ConfigMap", live)
    assert isinstance(found, Unread)
    assert (found.namespace, found.name) == ("a", "x")


async def test_events_of_a_pod_are_read_in_pages_too() -> None:
    server = Server(*[100] * 45)
    async with served(server.answer) as client:
        found = await names(client.list_pages(EVENT, "a", page_size=50))
    assert len(found) == 45


async def test_a_reflector_holds_a_too_large_object_against_its_service_alone() -> None:
    """A list with a tombstone is whole: what it does not name is gone, what it names is not."""
    server = Server(100, ANSWER_BYTES, 100)
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)

    async with served(server.answer) as client:
        reflector = watch_managed(client, CONFIG_MAP, "a", cache, None)
        running = asyncio.create_task(reflector.run())
        async with asyncio.timeout(30):
            await reflector.synced.wait()
            await server.watched.wait()
        running.cancel()
        server.ended.set()
    assert [found.name for found in cache.unreadable(Key("a", "chat"))] == ["x1"]
    assert sorted(name for _, name in cache.children(Key("a", "chat"))) == ["x0", "x2"]


def line(kind: str, body: str) -> bytes:
    server = Server(1, bodies={0: body})
    text = server.item(0).replace("{", '{"kind":"ConfigMap","apiVersion":"v1",', 1)
    return f'{{"type":"{kind}","object":{text}}}'.encode()


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
@pytest.mark.parametrize(
    "body", ['"' + "y" * ANSWER_BYTES + '"', '{"a":' * 5000 + "1" + "}" * 5000]
)
def test_a_watch_line_that_is_not_taken_says_which_object_changed(kind: str, body: str) -> None:
    event = decoded_event(line(kind, body)[: ANSWER_BYTES + 1])
    assert event["type"] == kind
    found = observe("ConfigMap", event["object"])
    assert isinstance(found, Unread)
    assert (found.name, found.version, found.service) == ("x0", 1, "chat")


def test_a_watch_line_that_names_nothing_breaks_the_watch() -> None:
    with pytest.raises(BrokenAnswer):
        decoded_event(b'{"type":"ADDED","object":{"a":"' + b"y" * ANSWER_BYTES)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 500), st.integers(0, 2**24))
def test_the_next_page_is_at_least_one_and_at_most_what_is_asked_for(
    limit: int, most: int, items: int, size: int
) -> None:
    assert 1 <= next_limit(limit, most, items, size) <= max(1, most)


LABELS = {f"l{number}": "" for number in range(50_000)}


def service(**spec: Any) -> Live:
    return {
        "metadata": {
            "name": "chat",
            "namespace": "a",
            "uid": "u1",
            "resourceVersion": "5",
            "generation": 2,
            "labels": LABELS,
            "annotations": {"a": "y" * 200_000},
            "finalizers": [f"a/{number}" for number in range(20_000)],
        },
        "spec": spec,
        "status": {"observedGeneration": 2},
    }


def test_the_cache_keeps_of_a_service_what_decisions_need() -> None:
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.put_service(service(replicas=3))
    entry = cache.service(Key("a", "chat"))
    assert entry is not None
    assert len(entry.packed) < 1000
    found = entry.unpack()
    assert found["spec"] == {"replicas": 3}
    assert found["status"] == {"observedGeneration": 2}
    assert found["metadata"].keys() == {"name", "namespace", "uid", "resourceVersion", "generation"}


def test_a_spec_that_is_too_large_is_not_kept_and_named() -> None:
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.put_service(service(podMetadata={"annotations": {"a": "y" * LARGEST_SPEC_BYTES}}))
    entry = cache.service(Key("a", "chat"))
    assert entry is not None
    assert len(entry.packed) < 1000
    (found,) = cache.unreadable(Key("a", "chat"))
    assert (found.kind, found.name) == ("InferenceService", "chat")
    assert str(LARGEST_SPEC_BYTES) in found.why
    cache.put_service(
        {**service(replicas=3), "metadata": {**service()["metadata"], "resourceVersion": "6"}}
    )
    assert cache.unreadable(Key("a", "chat")) == ()


def test_kopf_is_left_with_the_address_of_an_object_alone() -> None:
    """Its worker holds what it was given until it has been idle."""
    live = {"apiVersion": "v", "kind": "k", **service(replicas=1)}
    events._shed(live)
    assert len(json.dumps(live)) < 200
    assert live["metadata"]["uid"] == "u1"
