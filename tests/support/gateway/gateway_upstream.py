"""A service behind the gateway: it answers as the request's fields say, and keeps what it was sent.

`answer_as` in the body chooses how: `whole` (the default), `stream`, `hold` (a stream that waits for
`release`), `reset` (no answer), `cut` (half an answer), `garbage` (no HTTP), `refuse` (503).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from tests.support.guards import GUARD_S

ENDS: Final = ("whole", "whole", "stream", "stream", "reset", "cut", "garbage", "refuse")
"""Ways to answer that need no further event; a random request has one of them."""
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Received:
    """A request as it came."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        """Return the values of a header."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class UpstreamStandIn:
    """A server on loopback for the services of a test."""

    received: list[Received] = field(default_factory=list)
    port: int = 0
    _runner: web.AppRunner | None = None
    _open: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        """Listen."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            # A client that hangs up ends the work for it, as it does in vLLM.
            app,
            access_log=None,
            shutdown_timeout=1,
            handler_cancellation=True,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what is still open."""
        self._released.set()
        if self._runner is not None:
            await self._runner.cleanup()

    def release(self) -> None:
        """Let streams that are held end."""
        self._released.set()

    def hold(self) -> None:
        """Let streams be held again."""
        self._released.clear()

    async def open(self, count: int) -> None:
        """Wait until exactly so many requests are being answered."""
        async with asyncio.timeout(GUARD_S), self._changed:
            await self._changed.wait_for(lambda: self._open == count)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._count(1)
        try:
            body = await request.read()
            self.received.append(Received(request.path, list(request.headers.items()), body))
            return await self._as(request, _fields(body))
        finally:
            await self._count(-1)

    async def _count(self, by: int) -> None:
        async with self._changed:
            self._open += by
            self._changed.notify_all()

    async def _as(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        way = fields.get("answer_as") or ("stream" if fields.get("stream") is True else "whole")
        if way in {"stream", "hold"}:
            return await self._stream(request, held=way == "hold")
        if way == "refuse":
            return web.json_response({"error": {"message": "busy"}}, status=503)
        assert request.transport is not None
        if way == "garbage":
            request.transport.write(b"\x00\x01 no HTTP at all\r\n\r\n")
            request.transport.close()
        elif way == "cut":
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
            )
            request.transport.write(head + b'{"id": "ha')
            request.transport.close()
        elif way == "reset":
            request.transport.abort()
        return web.json_response(_completion(fields))

    async def _stream(self, request: web.Request, *, held: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the gateway hung up
            for number in range(3):
                await response.write(f'data: {{"n": {number}}}\n\n'.encode())
            if held:
                await self._released.wait()
            await response.write(DONE)
        return response


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _completion(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": fields.get("model"),
        "choices": [{"index": 0, "text": "a b c", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    }
