"""Answers of the gateway itself."""

from __future__ import annotations

import json

from fleetkeeper_contract.headers import REFUSED_HEADER
from fleetkeeper_gateway.http.asgi import Headers, Receive, Send
from fleetkeeper_gateway.http.connections.bodies import discard
from fleetkeeper_gateway.http.errors import Refusal

CLOSE = (b"connection", b"close")
_REFUSED = REFUSED_HEADER.lower().encode()


async def answer(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a complete JSON answer."""
    await _start(send, status, body, headers)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def answer_json(send: Send, value: object, headers: Headers) -> None:
    """Send a value as JSON with status 200."""
    await answer(send, 200, json.dumps(value).encode(), headers)


async def refuse(
    send: Send,
    receive: Receive,
    refusal: Refusal,
    headers: Headers,
    *,
    unread: bool,
    close: bool = False,
) -> None:
    """Send a refusal, marked with a header that no answer of a service has.

    Args:
        send: to the client.
        receive: from the client.
        refusal: the reason.
        headers: further headers.
        unread: True if the client may still send its body. The connection is closed then.
        close: True to close the connection at once. A client that still sends may not read the refusal.
    """
    body = refusal.body()
    headers = [*refusal.headers, *headers, (_REFUSED, refusal.code.encode())]
    if close or not unread:
        await answer(send, refusal.status, body, [*headers, CLOSE] if close else headers)
        return
    await _start(send, refusal.status, body, [*headers, CLOSE])
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _start(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = str(len(body)).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": status, "headers": own + headers})
