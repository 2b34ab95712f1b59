"""The few types and answers of ASGI that the middleware needs. No web framework: vLLM brings its own."""

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
    """The headers by name (ASGI: in lower case); of several of one name, the first."""
    return dict(reversed(list(scope.get("headers") or ())))


def without_headers(scope: Scope, names: Container[bytes], added: Headers) -> Scope:
    """A copy of the scope without the headers of some (lower-case) names and with others."""
    kept = [pair for pair in scope.get("headers") or () if pair[0] not in names]
    return {**scope, "headers": kept + added}


def error_body(message: str, kind: str, code: str, **details: object) -> bytes:
    """An error as the OpenAI API writes it."""
    error = {"message": message, "type": kind, "param": None, "code": code, **details}
    return json.dumps({"error": error}).encode()


async def answer(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Sends a whole JSON answer."""
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
        """It need not be kept any longer."""


class Inbox:
    """What a client sends: its body once, then only whether it is still there.

    The body is read before the request may wait, so that a hang-up is seen while it waits; whoever
    handles the request afterwards gets the body again.
    """

    def __init__(self, receive: Receive) -> None:
        self.client = receive
        """What the client sends, past the body that was read."""
        self._kept: KeptBody | None = None

    def give_again(self, kept: KeptBody) -> None:
        """The body for the next reader; it is released when it was given."""
        self._kept = kept

    async def receive(self) -> Message:
        """For the next reader: the body, then what the client does."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            message: Message = {"type": "http.request", "body": kept.body, "more_body": False}
            kept.release()
            return message
        return await self.client()

    async def gone(self) -> None:
        """Returns when the client has hung up. Only after the whole body was read; may be cancelled."""
        while (await self.client())["type"] != "http.disconnect":
            continue
