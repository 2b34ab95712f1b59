"""What the watch knows is what the server has, however lists and watches end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from fleetkeeper_gateway.kubernetes import client as client_module
from fleetkeeper_gateway.kubernetes.client import SECRETS, KubernetesClient
from fleetkeeper_gateway.kubernetes.reflector import Place, Watch
from tests.support.api_proxy import failure
from tests.support.list_watch_server import ListWatchServer

PATIENCE_S = 60.0


class Copy:
    """A sink that keeps the objects, and counts what it was given."""

    def __init__(self) -> None:
        self.objects: dict[str, Mapping[str, Any]] = {}
        self.puts = 0
        self.lists = 0
        self._changed = asyncio.Event()

    def put(self, place: Place, found: Mapping[str, Any]) -> None:
        self.objects[place[1]] = found
        self.puts += 1
        self._changed.set()

    def remove(self, place: Place) -> None:
        del self.objects[place[1]]
        self._changed.set()

    def listed(self) -> None:
        self.lists += 1
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the copy is as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def watching(
    server: ListWatchServer, *, namespaces: tuple[str, ...] = (), silence_s: float = PATIENCE_S
) -> AsyncIterator[tuple[Copy, Watch]]:
    copy = Copy()
    async with KubernetesClient(server.credentials) as client:
        watch = Watch(client, SECRETS, copy, namespaces=namespaces, silence_s=silence_s)
        task = asyncio.create_task(watch.run())
        try:
            yield copy, watch
            assert not task.done(), "nothing that a server sends ends the watch"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def serving(*names: str) -> AsyncIterator[ListWatchServer]:
    async with ListWatchServer() as server:
        for name in names:
            await server.put(thing(name))
        yield server


def thing(name: str, **fields: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "a"}, **fields}


async def test_pages_are_one_list_and_events_follow() -> None:
    async with serving("1", "2", "3", "4", "5") as server, watching(server) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        assert copy.objects.keys() == set("12345")
        assert watch.synced
        await server.put(thing("6"))
        await server.put(thing("1", data="new"))
        await server.remove("2")
        await copy.until(lambda: copy.objects.keys() == set("13456"))
        assert copy.objects["1"]["data"] == "new"
        assert server.lists == 1


async def test_a_watch_that_ends_is_resumed_without_a_list() -> None:
    async with serving("1") as server, watching(server) as (copy, _):
        await copy.until(lambda: copy.lists == 1)
        await server.put(thing("2"))
        await copy.until(lambda: "2" in copy.objects)
        await server.cut()
        await server.put(thing("3"))
        await copy.until(lambda: "3" in copy.objects)
        assert (server.lists, copy.puts) == (1, 3)


async def test_a_watch_that_breaks_after_events_is_resumed_without_a_list() -> None:
    """However often: a load balancer may reset each watch. Pauses begin anew each time, too."""
    async with serving("0") as server, watching(server) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        await server.until(lambda: server.watches == 1)
        while len(copy.objects) < 6:
            watches, count = server.watches, len(copy.objects) + 1
            await server.put(thing(str(count)))
            await copy.until(partial(lambda count: len(copy.objects) == count, count))
            await server.send(b"broken")
            await server.until(partial(lambda watches: server.watches > watches, watches))
        assert (server.lists, watch.failures) == (1, 5)


async def test_after_410_a_list_shows_what_is_gone_and_repeats_nothing() -> None:
    async with serving("1", "2", "3") as server, watching(server) as (copy, _):
        await copy.until(lambda: copy.lists == 1)
        await server.remove("2", silently=True)
        await server.put(thing("3", data="new"))
        await copy.until(lambda: copy.puts == 4)
        await server.send({"type": "ERROR", "object": failure(410, "Expired")})
        await copy.until(lambda: copy.objects.keys() == {"1", "3"})
        assert copy.puts == 4


async def test_a_list_that_expires_between_two_pages_begins_anew() -> None:
    async with serving("1", "2", "3") as server:
        server.expire_continue = True
        async with watching(server) as (copy, _):
            await copy.until(lambda: copy.lists == 1)
            assert copy.objects.keys() == set("123")


async def test_a_silent_watch_is_cut_and_the_list_read_again() -> None:
    async with serving("1", "2") as server, watching(server, silence_s=0.2) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        await server.remove("2", silently=True)
        await copy.until(lambda: copy.objects.keys() == {"1"})
        assert watch.failures >= 1


async def test_a_bookmark_is_a_contact_and_moves_the_version() -> None:
    async with serving("1") as server, watching(server) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        first = watch.last_contact
        server.version = 40
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}}
        await server.send(bookmark)
        await server.put(thing("2"))
        await copy.until(lambda: "2" in copy.objects)
        assert first is not None
        assert watch.last_contact is not None
        assert watch.last_contact > first
        assert watch.reflectors[0]._version == "41"


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b"{}",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": []}',
        b'{"type": "ADDED", "object": {"metadata": {"name": 1}}}',
        b'{"type": "DELETED", "object": {}}',
        b'{"type": "ERROR", "object": "x"}',
        b'{"type": "ERROR", "object": {}}',
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
async def test_a_broken_event_does_not_stop_the_watch(line: bytes) -> None:
    async with serving("1") as server, watching(server) as (copy, _):
        await copy.until(lambda: copy.lists == 1)
        server.version += 1
        await server.send(line)
        await server.put(thing("2"))
        await server.remove("1")
        await copy.until(lambda: copy.objects.keys() == {"2"})


@pytest.mark.parametrize(
    "answer", [b"", b"no json", b"[]", b"{}", b'{"metadata": {}, "items": []}']
)
async def test_a_broken_list_is_read_again(answer: bytes) -> None:
    async with serving("1") as server:
        server.raw_list = answer
        async with watching(server) as (copy, watch):
            await server.until(lambda: watch.failures >= 2)
            assert not watch.synced
            server.raw_list = None
            await copy.until(lambda: copy.objects.keys() == {"1"})


async def test_what_is_known_stays_while_the_server_refuses() -> None:
    async with serving("1") as server, watching(server) as (copy, watch):
        await copy.until(lambda: copy.lists == 1)
        known = watch.last_contact
        server.list_status = server.watch_status = 403
        await server.cut()
        await server.until(lambda: watch.failures >= 2)
        assert copy.objects.keys() == {"1"}
        assert watch.last_contact == known
        await server.remove("1", silently=True)
        server.list_status = server.watch_status = 200
        await copy.until(lambda: not copy.objects)


async def test_large_objects_make_for_smaller_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_BYTES", 25_000)
    async with serving() as server:
        server.page = 500
        for number in range(20):
            await server.put(thing(str(number), data="x" * 5000))
        async with watching(server) as (copy, _):
            await copy.until(lambda: copy.lists == 1)
            assert len(copy.objects) == 20


async def test_a_namespace_that_may_not_be_read_keeps_no_other_waiting() -> None:
    async with serving("1") as server:
        server.denied_namespace = "b"
        async with watching(server, namespaces=("a", "b")) as (copy, watch):
            await server.until(lambda: watch.synced)
            assert copy.objects.keys() == {"1"}
            assert watch.last_contact is None, "of one namespace nothing is known"


async def test_a_redirect_is_not_followed() -> None:
    async with serving("1") as server, serving("2") as other:
        server.redirect = other.credentials.url
        async with watching(server) as (copy, watch):
            await server.until(lambda: watch.failures >= 1)
            assert (copy.lists, other.lists) == (0, 0)
