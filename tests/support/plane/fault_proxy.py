"""A proxy in front of the real API server that injects one fault at a time.

A fault begins and ends when the test says so. A request that a fault delays goes on when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from enum import StrEnum
from random import Random
from types import TracebackType
from typing import Final

import aiohttp
from aiohttp import web

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.plane.api_proxy import ApiProxy, failure, is_watch, started

RETRY_AFTER_S: Final = 2
DELAYS_S: Final = (0.1, 10.0)
WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Fault(StrEnum):
    """What the API server, or the way to it, does wrong."""

    LATENCY = "latency of 0.1 to 10 s"
    CONFLICT = "409 for writes"
    EXPIRED = "410 for lists and watches"
    TOO_MANY = "429 with Retry-After"
    INTERNAL = "500 and 503"
    RESET_BEFORE = "reset before the write"
    RESET_AFTER = "reset after the write"
    WATCH_CLOSED = "watches close at once"
    NO_BOOKMARKS = "no bookmarks"
    STALE_LIST = "watches expire, lists are old"
    FORBIDDEN = "one namespace answers 403"


REFUSALS: Final = {
    Fault.CONFLICT: ((409, "Conflict"),),
    Fault.TOO_MANY: ((429, "TooManyRequests"),),
    Fault.INTERNAL: ((500, "InternalError"), (503, "ServiceUnavailable")),
    Fault.FORBIDDEN: ((403, "Forbidden"),),
}
BREAKS_WATCHES: Final = frozenset(
    {Fault.EXPIRED, Fault.WATCH_CLOSED, Fault.STALE_LIST, Fault.FORBIDDEN}
)


class FaultProxy(ApiProxy):
    """Forward every request that the fault in force does not concern."""

    def __init__(self, plane: ControlPlane, user: str, *, seed: int, forbidden: str) -> None:
        super().__init__(plane, user)
        self.fault: Fault | None = None
        self.injected = 0
        """How many requests and events the last fault changed."""
        self.hit = asyncio.Event()
        """Set at the first request or event that the fault changed."""
        self._forbidden = f"/namespaces/{forbidden}/"
        self._random = Random(seed)
        self._over = asyncio.Event()
        self._watches: dict[asyncio.Task[None], str] = {}
        self._lists: dict[str, bytes] = {}

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every connection."""
        self._over.set()
        for pump in self._watches:
            pump.cancel()
        await super().__aexit__(kind, error, trace)

    @contextlib.asynccontextmanager
    async def injected_fault(self, fault: Fault) -> AsyncIterator[None]:
        """Inject `fault` until the block ends."""
        self._over.clear()
        self.hit.clear()
        self.injected = 0
        self.fault = fault
        if fault in BREAKS_WATCHES:
            for pump, path in self._watches.items():
                if fault is not Fault.FORBIDDEN or self._forbidden in path:
                    pump.cancel()
        try:
            yield
        finally:
            self.fault = None
            self._over.set()

    def _count(self) -> None:
        self.injected += 1
        self.hit.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as the fault in force says."""
        if self.fault is None or not self._concerns(self.fault, request):
            return await self._forward(request)
        self._count()
        return await self._faulty(self.fault, request)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Answer as the server does, and keep lists for a later fault that repeats them."""
        response = await super().answer(request)
        if self.fault is None and _is_list(request) and isinstance(response, web.Response):
            body = response.body
            if response.status == 200 and isinstance(body, bytes):
                self._lists[request.path_qs] = body
        return response

    def _concerns(self, fault: Fault, request: web.Request) -> bool:
        match fault:
            case Fault.CONFLICT | Fault.RESET_BEFORE | Fault.RESET_AFTER:
                return request.method in WRITES
            case Fault.EXPIRED | Fault.STALE_LIST:
                return is_watch(request) or _is_list(request)
            case Fault.WATCH_CLOSED:
                return is_watch(request)
            case Fault.NO_BOOKMARKS:
                return False  # `stream` drops them
            case Fault.FORBIDDEN:
                return self._forbidden in f"{request.path}/"
            case _:
                return True

    async def _faulty(self, fault: Fault, request: web.Request) -> web.StreamResponse:
        if fault in REFUSALS:
            code, reason = self._random.choice(REFUSALS[fault])
            return _refusal(code, reason)
        if fault is Fault.WATCH_CLOSED:
            return await started(request, 200)
        if fault in {Fault.EXPIRED, Fault.STALE_LIST}:
            return self._expired(fault, request)
        if fault is Fault.LATENCY:
            await self._delay(self._random.uniform(*DELAYS_S))
            return await self._forward(request)
        if fault is Fault.RESET_AFTER:
            await super().answer(request)
        return _reset(request)

    def _expired(self, fault: Fault, request: web.Request) -> web.Response:
        """Return 410, or for a stale list what the same list contained before the fault."""
        old = self._lists.get(request.path_qs)
        if fault is Fault.STALE_LIST and old is not None and not is_watch(request):
            return web.Response(body=old, content_type="application/json")
        return _refusal(410, "Expired")

    async def _delay(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass a watch on, line by line, until a fault ends it."""
        response = await started(request, upstream.status)
        pump = asyncio.create_task(self._pump(upstream, response))
        self._watches[pump] = f"{request.path}/"
        try:
            await asyncio.wait({pump})
        finally:
            pump.cancel()
            del self._watches[pump]
        if not pump.cancelled() and (problem := pump.exception()) is not None:
            raise problem
        return response

    async def _pump(self, upstream: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        rest = b""
        async for chunk in upstream.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if self.fault is Fault.NO_BOOKMARKS and b'"type":"BOOKMARK"' in line[:40]:
                    self._count()
                    continue
                await response.write(line + b"\n")


def _is_list(request: web.Request) -> bool:
    """Return whether the request lists a collection."""
    return request.method == "GET" and "limit" in request.query and not is_watch(request)


def _refusal(code: int, reason: str) -> web.Response:
    return web.Response(
        status=code,
        headers={"Retry-After": str(RETRY_AFTER_S)} if code == 429 else {},
        text=json.dumps(failure(code, reason)),
        content_type="application/json",
    )


def _reset(request: web.Request) -> web.Response:
    """Cut the connection before any answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response(status=500)
