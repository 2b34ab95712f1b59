"""The few ASGI types and helpers that the middleware needs. It needs no web framework; vLLM brings one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Container, MutableMapping
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def first_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers by name (lower case in ASGI), with the first value of each name."""
    return dict(reversed(list(scope.get("headers") or ())))


def without_headers(scope: Scope, names: Container[bytes], added: Headers) -> Scope:
    """Return a copy of the scope without some headers (lower-case names) and with others added."""
    kept = [pair for pair in scope.get("headers") or () if pair[0] not in names]
    return {**scope, "headers": kept + added}


def error_body(message: str, kind: str, code: str, **details: object) -> bytes:
    """Return an error in the format of the OpenAI API."""
    error = {"message": message, "type": kind, "param": None, "code": code, **details}
    return json.dumps({"error": error}).encode()


async def answer(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Send a complete JSON response."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


class ClientGone(Exception):
    """The client hung up."""


class KeptBody(Protocol):
    """A body that was read."""

    body: bytes

    def release(self) -> None:
        """Release the body's memory."""


class Inbox:
    """The messages of a client: its body once, then only whether it is still connected.

    The body is read before the request may wait, so that a hang-up is detected during the wait. The
    handler of the request then gets the body again.
    """

    def __init__(self, receive: Receive) -> None:
        self.client = receive
        """The client's messages after the body that was read."""
        self._kept: KeptBody | None = None

    def replay(self, kept: KeptBody) -> None:
        """Provide the body to the next reader. It is released once it was read."""
        self._kept = kept

    async def receive(self) -> Message:
        """Return the body to the next reader, then the client's messages."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            message: Message = {"type": "http.request", "body": kept.body, "more_body": False}
            kept.release()
            return message
        return await self.client()

    async def gone(self) -> None:
        """Return when the client has hung up.

        Call it only after the whole body was read; it may be cancelled.
        """
        while (await self.client())["type"] != "http.disconnect":
            continue
