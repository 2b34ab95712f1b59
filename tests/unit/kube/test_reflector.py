# ruff: noqa: ARG002 - the doubles take what the real ones take
"""What a reflector knows is what the server has, however lists and watches end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import Place, Unreadable, place_of
from fleetkeeper_kube.reflector import TRIES_BEFORE_LIST, Reflector
from fleetkeeper_kube.resource import Resource
from tests.support.guards import GUARD_S
from tests.support.plane.api_proxy import failure
from tests.support.plane.list_watch_server import ListWatchServer, serving, thing

THING = Resource("Thing", "things", "v1")


class Copy:
    """A sink that keeps the objects, and an observer that keeps the failures."""

    def __init__(self) -> None:
        self.objects: dict[str, Mapping[str, Any]] = {}
        self.lists: list[tuple[set[str], int]] = []
        self.problems: list[ApiError] = []
        self.recoveries = 0
        self._changed = asyncio.Event()

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        try:
            place = place_of(kind, live)
        except Unreadable:
            return None
        self.objects[place.name] = live
        self._changed.set()
        return place

    def gone(self, found: Place) -> None:
        self.objects.pop(found.name, None)
        self._changed.set()

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        self.lists.append(({name for _, name in names}, version))
        for name in self.objects.keys() - {name for _, name in names}:
            del self.objects[name]
        self._changed.set()

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        self.problems.append(problem)
        self._changed.set()

    def recovered(self, reflector: Reflector) -> None:
        self.recoveries += 1

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the copy is as wanted."""
        async with asyncio.timeout(GUARD_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def watching(
    server: ListWatchServer, *, silence_s: float = GUARD_S, listed: bool = True, fields: str = ""
) -> AsyncIterator[tuple[Copy, Reflector]]:
    """Yield a copy of the server's objects; with `listed`, once its watch has begun."""
    copy = Copy()
    async with KubernetesClient(server.credentials) as client:
        reflector = Reflector(
            client,
            THING,
            None,
            copy,
            copy,
            fields=fields,
            silence_s=silence_s,
            jitter=lambda _: 0.0,
        )
        task = asyncio.create_task(reflector.run())
        try:
            if listed:
                await server.until(lambda: server.watches == 1)
            yield copy, reflector
            assert not task.done(), "nothing that a server sends ends the watch"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_pages_are_one_list_and_events_follow() -> None:
    async with serving(*"12345") as server, watching(server) as (copy, reflector):
        assert copy.objects.keys() == set("12345")
        assert copy.lists == [(set("12345"), server.version)]
        assert reflector.synced.is_set()
        await server.put(thing("6"))
        await server.put(thing("1", data="new"))
        await server.remove("2")
        await copy.until(lambda: copy.objects.keys() == set("13456"))
        assert copy.objects["1"]["data"] == "new"
        assert (reflector.lists, reflector.failures) == (1, 0)


async def test_a_field_selector_is_sent_with_the_list_and_the_watch() -> None:
    """Rights on one name allow only requests that select it."""
    async with (
        serving("1", "2") as server,
        watching(server, fields="metadata.name=2") as (copy, _),
    ):
        assert copy.lists == [({"2"}, server.version)]
        await server.put(thing("1", data="new"))
        await server.put(thing("2", data="new"))
        await copy.until(lambda: copy.objects["2"].get("data") == "new")
        assert copy.objects.keys() == {"2"}


async def test_a_watch_that_ends_after_an_event_is_resumed_without_a_list() -> None:
    async with serving("1") as server, watching(server) as (copy, reflector):
        await server.put(thing("2"))
        await copy.until(lambda: "2" in copy.objects)
        await server.cut()
        await server.put(thing("3"))
        await copy.until(lambda: "3" in copy.objects)
        assert (reflector.lists, reflector.failures) == (1, 0)


async def test_a_watch_that_breaks_after_events_is_resumed_without_a_list() -> None:
    """However often: a load balancer may reset each watch. Pauses begin again each time, too."""
    async with serving("0") as server, watching(server) as (copy, reflector):
        while len(copy.objects) < 6:
            watches, count = server.watches, len(copy.objects) + 1
            await server.put(thing(str(count)))
            await copy.until(partial(lambda count: len(copy.objects) == count, count))
            await server.send(b"broken")
            await server.until(partial(lambda watches: server.watches > watches, watches))
        assert (reflector.lists, reflector.failures, copy.recoveries) == (1, 5, 4)


@pytest.mark.parametrize("in_stream", [True, False], ids=["in the stream", "refused"])
async def test_after_410_a_list_shows_what_is_gone(in_stream: bool) -> None:
    async with serving("1", "2", "3") as server, watching(server) as (copy, reflector):
        await server.remove("2", silently=True)
        if in_stream:
            await server.send({"type": "ERROR", "object": failure(410, "Expired")})
        else:
            server.watch_status = 410
            await server.cut()
        await copy.until(lambda: copy.objects.keys() == {"1", "3"})
        assert reflector.lists >= 2


async def test_a_list_that_expires_between_two_pages_is_read_again_and_drops_nothing() -> None:
    async with serving("1", "2", "3") as server:
        server.expire_continue = True
        async with watching(server) as (copy, _):
            assert [names for names, _ in copy.lists] == [set("123")]


async def test_a_silent_watch_is_cut_and_the_list_read_again() -> None:
    async with serving("1", "2") as server, watching(server, silence_s=0.1) as (copy, reflector):
        await server.remove("2", silently=True)
        await copy.until(lambda: copy.objects.keys() == {"1"})
        assert reflector.failures >= TRIES_BEFORE_LIST
        assert copy.problems[0].reason == "SilentWatch"


async def test_a_watch_that_falls_silent_after_an_event_is_resumed_where_it_was() -> None:
    async with serving("1") as server, watching(server, silence_s=0.2) as (_, _):
        await server.put(thing("2"))
        await server.until(lambda: server.watches == 2)
        assert server.watched_from == [2, 3]


async def test_a_bookmark_is_a_contact_and_moves_the_version() -> None:
    async with serving("1") as server, watching(server) as (copy, reflector):
        first = reflector.last_contact
        server.version = 40
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}}
        await server.send(bookmark)
        await server.put(thing("2"))
        await copy.until(lambda: "2" in copy.objects)
        assert first is not None
        assert reflector.last_contact is not None
        assert reflector.last_contact > first
        await server.cut()
        await server.until(lambda: server.watches == 2)
        assert server.watched_from == [2, 41]


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b"{}",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": []}',
        b'{"type": "ADDED", "object": {"metadata": {"name": 1}}}',
        b'{"type": "STRANGE", "object": {"metadata": {"name": "x"}}}',
        b'{"type": "DELETED", "object": {}}',
        b'{"type": "ERROR", "object": "x"}',
        b'{"type": "ERROR", "object": {}}',
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 500}}',
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
async def test_a_broken_event_does_not_stop_the_watch(line: bytes) -> None:
    async with serving("1") as server, watching(server) as (copy, _):
        server.version += 1
        await server.send(line)
        await server.put(thing("2"))
        await server.remove("1")
        await copy.until(lambda: copy.objects.keys() == {"2"})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"metadata": {}, "items": []}',
        b'{"metadata": {"resourceVersion": "5"}}',
    ],
)
async def test_a_broken_list_is_read_again(answer: bytes) -> None:
    """An empty answer must never look like an empty cluster."""
    async with serving("1") as server:
        server.raw_list = answer
        async with watching(server, listed=False) as (copy, reflector):
            await copy.until(lambda: reflector.failures >= 2)
            assert not reflector.synced.is_set()
            server.raw_list = None
            await copy.until(lambda: copy.objects.keys() == {"1"})


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_watch_refused_again_and_again_ends_in_a_list(status: int) -> None:
    async with serving("1") as server:
        server.watch_status = status
        async with watching(server) as (copy, reflector):
            await copy.until(lambda: len(copy.lists) == 2)
            assert {problem.status for problem in copy.problems} == {status}
            assert reflector.failures >= TRIES_BEFORE_LIST


async def test_watches_that_end_without_events_end_in_a_list_and_are_no_failures() -> None:
    async with serving("1") as server, watching(server) as (copy, reflector):
        for watches in range(2, TRIES_BEFORE_LIST + 2):
            await server.cut()
            await server.until(partial(lambda count: server.watches == count, watches))
        assert (reflector.lists, reflector.failures, copy.problems) == (2, 0, [])


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_is_known_stays_while_the_server_refuses(status: int) -> None:
    """And only a list shows what was deleted meanwhile."""
    async with serving("1") as server, watching(server) as (copy, reflector):
        known = reflector.last_contact
        server.list_status = server.watch_status = status
        await server.cut()
        await copy.until(lambda: copy.problems[-1:] != [] and copy.problems[-1].is_refusal)
        assert copy.objects.keys() == {"1"}
        assert reflector.last_contact == known
        await server.remove("1", silently=True)
        server.list_status = server.watch_status = 200
        await copy.until(lambda: not copy.objects)
        assert copy.recoveries == 1


async def test_the_observer_can_end_the_reflector() -> None:
    async with serving() as server, KubernetesClient(server.credentials) as client:
        server.list_status = 403
        copy = Copy()
        reflector = Reflector(client, THING, None, copy, Ending(), jitter=lambda _: 0.0)
        with pytest.raises(ApiError, match="403"):
            await reflector.run()


class Ending(Copy):
    """An observer for which each failure is the last one."""

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        raise problem
