# ruff: noqa: ARG002 - the doubles take what the real ones take
"""A reflector keeps a kind in view, whatever the server answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.records import Place, place_of
from fleetkeeper.adapters.kubernetes.reflector import Reflector
from fleetkeeper.adapters.kubernetes.resources import CHILDREN, Resource
from fleetkeeper.reconcile.types import Kind

CONFIG_MAP = CHILDREN[Kind.CONFIG_MAP]
Live = dict[str, Any]


def config(name: str, version: int) -> Live:
    return {"metadata": {"name": name, "namespace": "a", "resourceVersion": str(version)}}


def page(version: int, *items: Live) -> Live:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


def event(kind: str, live: Live) -> bytes:
    return json.dumps({"type": kind, "object": live}).encode()


def error(code: int) -> bytes:
    return event("ERROR", {"kind": "Status", "code": code, "reason": "Expired", "message": "old"})


class Server:
    """Plays a script: each list and each watch takes the next entry; the last watch stays silent."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists = lists
        self.watches = watches
        self.watched_from: list[str] = []

    async def list_pages(
        self, resource: Resource, namespace: str | None, *, selector: str
    ) -> AsyncIterator[Live]:
        assert selector == "app.kubernetes.io/managed-by=fleetkeeper"
        for found in self.lists.pop(0):
            if isinstance(found, Exception):
                raise found
            yield found

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str | None, *, resource_version: str, **_: Any
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.watched_from.append(resource_version)
        if not self.watches:
            await asyncio.Event().wait()
        found = self.watches.pop(0)
        if isinstance(found, Exception):
            raise found

        async def lines() -> AsyncIterator[bytes]:
            for line in found:
                if line is None:
                    await asyncio.Event().wait()
                yield line

        yield lines()


class Sink:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.changed = asyncio.Event()

    def take(self, kind: str, live: Live) -> Place | None:
        place = place_of(kind, live)
        self._tell("put", place.name, place.version)
        return place

    def gone(self, found: Place) -> None:
        self._tell("gone", found.name, found.version)

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        self._tell("listed", sorted(name for _, name in names), version)

    def _tell(self, *what: Any) -> None:
        self.told.append(what)
        self.changed.set()


class Clock:
    def monotonic(self) -> float:
        return 0.0

    def jitter(self, seconds: float) -> float:
        return 0.0


async def played(
    server: Server, until: Callable[[Sink, Reflector], bool], silence_s: float = 70.0
) -> tuple[Sink, Reflector]:
    sink = Sink()
    reflector = Reflector(server, CONFIG_MAP, None, sink, Clock(), silence_s=silence_s)  # type: ignore[arg-type]
    running = asyncio.create_task(reflector.run())
    try:
        async with asyncio.timeout(60):
            while not until(sink, reflector):
                if running.done():
                    running.result()
                await asyncio.sleep(0)
    finally:
        running.cancel()
    return sink, reflector


async def test_a_list_of_pages_then_a_watch_from_where_it_ended() -> None:
    server = Server(
        [[page(5, config("x", 1)), page(5, config("y", 2))]],
        [[event("MODIFIED", config("x", 7)), event("DELETED", config("y", 8)), None]],
    )
    sink, reflector = await played(server, lambda sink, _: len(sink.told) == 5)
    assert sink.told == [
        ("put", "x", 1),
        ("put", "y", 2),
        ("listed", ["x", "y"], 5),
        ("put", "x", 7),
        ("gone", "y", 8),
    ]
    assert server.watched_from == ["5"]
    assert (reflector.epoch, reflector.synced.is_set()) == (1, True)


async def test_a_watch_that_ends_goes_on_from_its_last_bookmark() -> None:
    server = Server([[page(5)]], [[event("BOOKMARK", config("", 9))], [None]])
    await played(server, lambda *_: len(server.watched_from) == 2)
    assert server.watched_from == ["5", "9"]


@pytest.mark.parametrize(
    "expired", [[error(410)], ApiError(410, "Expired", "too old")], ids=["in the stream", "refused"]
)
async def test_an_expired_watch_lists_again_and_forgets(expired: Any) -> None:
    server = Server([[page(5, config("ghost", 1))], [page(20)]], [expired])
    sink, _ = await played(server, lambda _, found: found.epoch == 2)
    assert sink.told[-1] == ("listed", [], 20)
    assert server.watched_from[0] == "5"


async def test_a_list_that_expires_between_pages_drops_nothing() -> None:
    server = Server(
        [[page(5, config("x", 1)), ApiError(410, "Expired", "")], [page(9, config("x", 1))]], []
    )
    sink, _ = await played(server, lambda _, found: found.epoch == 1)
    assert [what for what in sink.told if what[0] == "listed"] == [("listed", ["x"], 9)]


@pytest.mark.parametrize(
    "broken",
    [
        [error(500)],
        [b"not json"],
        [b"[1]"],
        [b'{"type": "ADDED"}'],
        [event("STRANGE", config("x", 1))],
        [],
        ApiError(0, "Timeout", ""),
        ApiError(503, "ServiceUnavailable", ""),
        ApiError(429, "TooManyRequests", "", retry_after_s=0.0),
    ],
)
async def test_a_broken_watch_is_taken_up_again(broken: Any) -> None:
    server = Server([[page(5)]], [broken, [event("ADDED", config("x", 6)), None]])
    _, reflector = await played(server, lambda sink, _: ("put", "x", 6) in sink.told)
    assert reflector.failures == 1
    assert reflector.epoch == 1


async def test_a_watch_broken_again_and_again_ends_in_a_list() -> None:
    server = Server([[page(5)], [page(9)]], [ApiError(500, "", "")] * 3)
    _, reflector = await played(server, lambda _, found: found.epoch == 2)
    assert reflector.failures == 3


async def test_a_silent_watch_is_cut_and_taken_up_where_it_was() -> None:
    server = Server([[page(5)]], [[event("ADDED", config("x", 6)), None], [None]])
    await played(server, lambda *_: len(server.watched_from) == 2, silence_s=0.05)
    assert server.watched_from == ["5", "6"]


@pytest.mark.parametrize("body", [{}, {"metadata": {}}, {"metadata": {"resourceVersion": "5"}}])
async def test_a_list_without_items_or_version_is_no_list(body: Live) -> None:
    """An empty answer must never look like an empty cluster."""
    server = Server([[body], [page(9, config("x", 1))]], [])
    sink, _ = await played(server, lambda _, found: found.epoch == 1)
    assert sink.told[-1] == ("listed", ["x"], 9)


async def test_a_kind_that_may_not_be_read_is_told_at_the_start() -> None:
    server = Server([[ApiError(403, "Forbidden", "no")]], [])
    with pytest.raises(ApiError, match="403"):
        await played(server, lambda *_: False)
