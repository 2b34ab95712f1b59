"""Cross-origin requests of browsers (CORS): allowed origins and preflights."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from fleetkeeper_gateway.http.asgi import Headers, Message, Receive, Scope, Send

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_SECONDS: Final = b"600"
"""Time for which a browser may cache a preflight."""
_EXPOSED: Final = b", ".join(
    (
        b"retry-after",
        b"x-client-request-id",
        b"x-fleetkeeper-refused",
        b"x-ratelimit-limit-requests",
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-requests",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-requests",
        b"x-ratelimit-reset-tokens",
        b"x-request-id",
    )
)
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9, -]{0,1024}")
_BODY: Final = frozenset({b"content-length", b"transfer-encoding"})


class CrossOrigin:
    """An application whose answers may be read by scripts of the allowed origins.

    No answer allows the browser's credentials: a script sends its key itself.
    """

    def __init__(self, application: Application, origins: Iterable[str]) -> None:
        """Take an application, and origins as browsers send them: SCHEME://HOST[:PORT]."""
        self._application = application
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        sent = dict(scope["headers"])
        origin = sent.get(b"origin")
        if origin is None or origin not in self._origins:
            await self._application(scope, receive, send)
            return
        own = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        if _is_preflight(scope, sent):
            await _allow(send, own, sent.get(b"access-control-request-headers", b""))
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = [(b"access-control-expose-headers", _EXPOSED)]
                message["headers"] = [*message["headers"], *own, *exposed]
            await send(message)

        await self._application(scope, receive, send_with_origin)


def _is_preflight(scope: Scope, sent: dict[bytes, bytes]) -> bool:
    return (
        scope["method"] == "OPTIONS"
        and b"access-control-request-method" in sent
        and sent.keys().isdisjoint(_BODY)
    )


async def _allow(send: Send, own: Headers, asked: bytes) -> None:
    """Answer a preflight. It has no key; the request that follows needs a key."""
    headers = [*own, (b"access-control-allow-methods", b"GET, POST")]
    if asked and _HEADER_NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    headers.append((b"access-control-max-age", _SECONDS))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
