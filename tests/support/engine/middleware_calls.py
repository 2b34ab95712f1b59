"""The tier middleware in front of a stand-in for vLLM, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetkeeper_engine.in_vllm.http.asgi import Message, Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.bodies import BodyLimits
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from tests.support.guards import GUARD_S

PART_BYTES = 65_536


class StandInVllm:
    """Takes a whole body, then answers when told; ends with the client."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        self._took = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        self.taken.append(message["body"])
        self._took.set()
        gone = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(self.go.wait())
        try:
            await asyncio.wait((gone, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            ended.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done", "more_body": False})

    async def until_taken(self, count: int) -> None:
        """Returns when so many requests have reached it."""
        async with asyncio.timeout(GUARD_S):
            while len(self.taken) < count:
                self._took.clear()
                await self._took.wait()


class Call:
    """One request of a client. Its body comes at once, or as far as `feed` brings it."""

    def __init__(
        self, app: Callable[..., Any], body: bytes | None = b'{"prompt": "x"}', **scope: Any
    ) -> None:
        self.sent: list[Message] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        if body is not None:
            for at in range(0, max(1, len(body)), PART_BYTES):
                self.feed(body[at : at + PART_BYTES], more=at + PART_BYTES < len(body))
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "client": ("10.0.0.9", 1234),
            **scope,
        }
        self.task = asyncio.ensure_future(app(self.scope, self._inbox.get, self._take))

    async def _take(self, message: Message) -> None:
        self.sent.append(message)

    def feed(self, part: bytes, *, more: bool = True) -> None:
        """Sends a part of the body."""
        self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def hang_up(self) -> None:
        """The client goes."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body."""
        async with asyncio.timeout(GUARD_S):
            await self.task
        start = self.sent[0]
        body = b"".join(message.get("body", b"") for message in self.sent[1:])
        headers = {str(k, "latin-1"): str(v, "latin-1") for k, v in start["headers"]}
        return start["status"], headers, json.loads(body) if body.startswith(b"{") else body


@contextmanager
def running_middleware(
    app: Callable[..., Any],
    *,
    bodies: BodyLimits | None = None,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> Iterator[TierMiddleware]:
    """A middleware whose ticks end with the block."""
    vllm_settings = VllmSettings(**{"max_sequences": 4, "min_sequences": 1, **settings})
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    made = TierMiddleware(app, vllm_settings, bodies=bodies, **more)
    try:
        yield made
    finally:
        if made._dispatcher._ticker is not None:
            made._dispatcher._ticker.cancel()


def assert_nothing_left(app: TierMiddleware) -> None:
    """No request, byte or place is held for a client that has gone."""
    assert (app._admission.waiting, app._admission.released) == (0, 0)
    assert [state.held for state in app._admission.tiers] == [0, 0, 0]
    assert [state.waiting_sequences for state in app._admission.tiers] == [0, 0, 0]
    assert (app._bodies.held, app._bodies.receiving) == (0, set())
    assert (app._lane.free, app._lane.waiting) == (2, 0)
    assert not app._dispatcher.running
    assert not app._dispatcher._waiters
