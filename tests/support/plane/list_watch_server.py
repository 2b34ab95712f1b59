"""A small API server for one resource: what a real one cannot be made to do at will."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from fleetkeeper_kube.credentials import Credentials
from tests.support.guards import GUARD_S
from tests.support.plane.api_proxy import failure


class ListWatchServer:
    """Objects that are listed in pages and watched. A test changes them, and breaks what it wants."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.lists = 0
        self.watches = 0
        self.watched_from: list[int] = []
        """The resourceVersion with which each watch that was not refused began."""
        self.page = 2
        """Objects in a page at most, whatever the client asks."""
        self.list_status = 200
        self.watch_status = 200
        self.raw_list: bytes | None = None
        """Answer of the next lists, whatever it is."""
        self.expire_continue = False
        """Whether the second page of the next list is refused with 410."""
        self.denied_namespace = ""
        """Namespace whose lists are refused with 403."""
        self.redirect = ""
        """Address to which lists are redirected."""
        self.changed = asyncio.Condition()
        self._events: list[tuple[int, str, bytes]] = []
        """Version, name of the object and line of each event."""
        self._open: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None
        self.credentials = Credentials("")

    async def __aenter__(self) -> Self:
        """Listen on loopback."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.credentials = Credentials(f"http://127.0.0.1:{self._runner.addresses[0][1]}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every connection."""
        await self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    async def put(self, found: dict[str, Any]) -> None:
        """Create or change an object, and send the event."""
        name = found["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[name] = found
        await self.send({"type": kind, "object": found})

    async def remove(self, name: str, *, silently: bool = False) -> None:
        """Delete an object; with `silently` no watch tells of it."""
        self.version += 1
        found = self.objects.pop(name)
        found["metadata"]["resourceVersion"] = str(self.version)
        if not silently:
            await self.send({"type": "DELETED", "object": found})

    async def send(self, event: dict[str, Any] | bytes) -> None:
        """Send an event to every watch, those that resume before it included."""
        line = event if isinstance(event, bytes) else json.dumps(event).encode()
        name = "" if isinstance(event, bytes) else _name_of(event["object"])
        async with self.changed:
            self._events.append((self.version, name, line + b"\n"))
            self.changed.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is true; it is looked at after each request and event."""
        async with asyncio.timeout(GUARD_S), self.changed:
            await self.changed.wait_for(holds)

    async def cut(self) -> None:
        """End every watch."""
        async with self.changed:
            self._open.clear()
            self.changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async with self.changed:
            self.changed.notify_all()
        if request.query.get("watch") == "true":
            return await self._watch(request)
        return await self._list(request)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect + request.path_qs)
        if f"/namespaces/{self.denied_namespace}/" in request.path:
            return web.json_response(failure(403, "Forbidden"), status=403)
        if self.list_status != 200:
            return web.json_response(failure(self.list_status, "Refused"), status=self.list_status)
        if self.raw_list is not None:
            return web.Response(body=self.raw_list)
        start = int(request.query.get("continue", "0"))
        if start and self.expire_continue:
            self.expire_continue = False
            return web.json_response(failure(410, "Expired"), status=410)
        end = start + min(self.page, int(request.query["limit"]))
        wanted = _wanted_name(request)
        objects = [found for name, found in self.objects.items() if wanted in {"", name}]
        metadata = {"resourceVersion": str(self.version)}
        if end < len(objects):
            metadata["continue"] = str(end)
        else:
            self.lists += 1
        return web.json_response({"metadata": metadata, "items": objects[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        if self.watch_status != 200:
            return web.json_response(
                failure(self.watch_status, "Refused"), status=self.watch_status
            )
        since = int(request.query["resourceVersion"])
        self.watched_from.append(since)
        wanted = _wanted_name(request)
        response = web.StreamResponse()
        await response.prepare(request)
        self._open.add(response)
        sent = 0
        async with self.changed:
            self.changed.notify_all()
            while response in self._open:
                for version, name, line in self._events[sent:]:
                    if version > since and (not name or wanted in {"", name}):
                        await response.write(line)
                sent = len(self._events)
                await self.changed.wait()
        return response


def _wanted_name(request: web.Request) -> str:
    """Return the name that the field selector asks for, empty without one."""
    return request.query.get("fieldSelector", "").removeprefix("metadata.name=")


def _name_of(found: object) -> str:
    metadata = found.get("metadata", {}) if isinstance(found, dict) else {}
    return str(metadata.get("name", ""))


@asynccontextmanager
async def serving(*names: str) -> AsyncIterator[ListWatchServer]:
    """Yield a server with objects of these names."""
    async with ListWatchServer() as server:
        for name in names:
            await server.put(thing(name))
        yield server


def thing(name: str, **fields: str) -> dict[str, Any]:
    """Return an object."""
    return {"metadata": {"name": name, "namespace": "a"}, **fields}
