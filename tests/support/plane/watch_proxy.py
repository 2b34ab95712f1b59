"""A proxy in front of the real API server that can cut, silence, hold back and poison watches."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType

import aiohttp
from aiohttp import web

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.plane.api_proxy import ApiProxy, failure, is_watch, started


class WatchProxy(ApiProxy):
    """Forwards everything; watches as long as they are let."""

    def __init__(self, plane: ControlPlane, user: str) -> None:
        super().__init__(plane, user)
        self._cut = False
        self._expired = False
        self._ends: set[asyncio.Event] = set()
        self._told: set[str] = set()
        self._spared: str | None = None
        self.limited = 0
        """How many requests were answered 429."""
        self._poison: dict[str, int] = {}
        self._poisoned = asyncio.Event()
        self._held = ""
        self._flows = asyncio.Event()
        self._flows.set()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends every connection."""
        for end in self._ends:
            end.set()
        await super().__aexit__(kind, error, trace)

    def cut_watches(self) -> None:
        """Ends all watches and refuses new ones."""
        self._cut = True
        for end in self._ends:
            end.set()

    def heal_watches(self, *, expired: bool) -> None:
        """Lets watches pass again; with `expired` each kind is first told once that it is too old."""
        self._cut = False
        self._expired = expired

    def send_error(self, plural: str, *, code: int) -> None:
        """Puts an ERROR event into the running watch of one resource, which then ends."""
        self._poison[plural] = code
        self._poisoned.set()

    def hold(self, plural: str) -> None:
        """Hold back all events of one resource from now on."""
        self._held = plural
        self._flows.clear()

    def release(self) -> None:
        """Deliver what was held back, and hold back nothing more."""
        self._flows.set()

    def limit(self, *, spare: str | None) -> None:
        """Answer 429 with Retry-After: 30 to all but one resource; with None let all pass again."""
        self._spared = spare

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Refuses watches while they are cut, and what `limit` says."""
        if is_watch(request) and self._cut:
            return web.Response(status=503, text="cut")
        if self._spared is not None and f"/{self._spared}" not in request.path:
            self.limited += 1
            return web.Response(status=429, headers={"Retry-After": "30"})
        return await super().answer(request)

    async def stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Passes a watch on until it is cut or poisoned."""
        response = await started(request, upstream.status)
        plural = request.path.rpartition("/")[2]
        if self._expired and plural not in self._told:
            self._told.add(plural)
            await response.write(error_event(410, "Expired"))
            return response
        end = asyncio.Event()
        self._ends.add(end)
        pump = asyncio.create_task(self._pump(plural, upstream, response))
        stop = asyncio.create_task(end.wait())
        try:
            while not pump.done() and not stop.done():
                poison = asyncio.create_task(self._poisoned.wait())
                await asyncio.wait({pump, stop, poison}, return_when=asyncio.FIRST_COMPLETED)
                poison.cancel()
                if plural in self._poison:
                    code = self._poison.pop(plural)
                    self._poisoned.clear()
                    await response.write(error_event(code, "InternalError"))
                    break
                if self._poisoned.is_set():
                    await asyncio.sleep(0.01)  # the poison is another watch's
        finally:
            self._ends.discard(end)
            pump.cancel()
            stop.cancel()
        return response

    async def _pump(
        self, plural: str, upstream: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        """Pass on whole lines, so that an error event is a line of its own."""
        rest = b""
        async for chunk in upstream.content.iter_any():
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            if plural == self._held:
                await self._flows.wait()
            if end:
                await response.write(lines + end)


def error_event(code: int, reason: str) -> bytes:
    """Return a watch line of type ERROR."""
    return json.dumps({"type": "ERROR", "object": failure(code, reason)}).encode() + b"\n"
