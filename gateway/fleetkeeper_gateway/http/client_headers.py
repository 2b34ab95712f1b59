"""Parses a client's headers, and selects those that a service receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from fleetkeeper_contract.headers import REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_contract.sleep import WAKE_HEADER
from fleetkeeper_gateway.http.asgi import Headers
from fleetkeeper_gateway.http.errors import Refusal

SERVICE_HEADER: Final = "X-Fleetkeeper-Service"
CLIENT_REQUEST_ID_HEADER: Final = "X-Client-Request-Id"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"trailers",
        b"transfer-encoding",
        b"upgrade",
    }
)
_DROPPED = _HOP_BY_HOP | {
    # Identifies a client to the gateway, or to a proxy before it.
    b"authorization",
    b"proxy-authorization",
    b"cookie",
    b"api-key",
    b"x-api-key",
    b"forwarded",
    b"x-real-ip",
    # Chooses an engine core within a replica, past the engine's own balance.
    b"x-data-parallel-rank",
    # Set again for each attempt.
    TIER_HEADER.lower().encode(),
    REQUEST_ID_HEADER.lower().encode(),
    CLIENT_REQUEST_ID_HEADER.lower().encode(),
    b"baggage",
    b"content-length",
    b"host",
    # About this connection.
    b"expect",
    b"http2-settings",
}
_PREFIX_KEY = b"x-fleetkeeper-prefix"
"""The prefix key of a client, for `routing.policy: PrefixAware`."""
_DROPPED_PREFIXES = (b"x-fleetkeeper-", b"x-forwarded-", b"x-vllm-")
_SINGLE = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        SERVICE_HEADER.lower().encode(),
        TIER_HEADER.lower().encode(),
    }
)
"""Headers that must be single: two readers could interpret a repeated one differently."""
_ANSWER = frozenset({b"content-type", b"content-length", b"content-encoding", b"retry-after"})
"""Headers of a service's answer that the client receives, beside `openai-*`: those of OpenAI's API."""
_ANSWER_PREFIXES = (b"openai-",)
_MAX_ID_BYTES = 200
_CACHED_BYTES = 64
"""Maximum bytes of a header name in the cache, because a client chooses the names."""


@dataclass(slots=True)
class ClientHeaders:
    """The headers of one request."""

    forwarded: list[tuple[str, str]] = field(default_factory=list)
    """Headers for the service, without those that the gateway adds."""
    authorization: str | None = None
    tier: str | None = None
    service: str | None = None
    wake: str | None = None
    request_id: str | None = None
    """The client's request ID, if it is short printable ASCII."""
    baggage: list[str] = field(default_factory=list)
    content_length: int | None = None
    encoding: str = ""
    """Content-Encoding, in lower case."""


def parse_headers(headers: Iterable[tuple[bytes, bytes]]) -> ClientHeaders:
    """Parse the headers of a request.

    Raises:
        Refusal: if a header that must be single is repeated.
    """
    parsed = ClientHeaders()
    own: dict[bytes, bytes] = {}
    named_by_connection: set[str] = set()
    for name, value in headers:
        kept = _known_name(name) if len(name) <= _CACHED_BYTES else _forwarded_name(name)
        if kept is not None:
            text = _text(value)
            if text is not None:
                parsed.forwarded.append((kept, text))
            if name not in _SINGLE:
                continue
        if name in own and name in _SINGLE:
            raise _twice(name)
        if name == b"connection":
            named_by_connection.update(_text_of_tokens(value))
        elif name == b"baggage":
            parsed.baggage.append(value.decode("latin-1"))
        else:
            own[name] = value
    if named_by_connection:
        parsed.forwarded = [
            pair for pair in parsed.forwarded if pair[0].lower() not in named_by_connection
        ]
    _read_own(parsed, own)
    return parsed


def _read_own(parsed: ClientHeaders, own: dict[bytes, bytes]) -> None:
    for name, attribute in _ATTRIBUTES:
        value = own.get(name)
        if value is not None:
            setattr(parsed, attribute, value.decode("latin-1"))
    parsed.encoding = parsed.encoding.strip().lower()
    length = own.get(b"content-length")
    if length is not None and length.isdigit() and len(length) < 20:
        parsed.content_length = int(length)
    parsed.request_id = _identifier(own.get(b"x-request-id")) or _identifier(
        own.get(b"x-client-request-id")
    )


_ATTRIBUTES = (
    (b"authorization", "authorization"),
    (TIER_HEADER.lower().encode(), "tier"),
    (SERVICE_HEADER.lower().encode(), "service"),
    (WAKE_HEADER.lower().encode(), "wake"),
    (b"content-encoding", "encoding"),
)


def _twice(name: bytes) -> Refusal:
    return Refusal(
        400,
        "duplicate_header",
        f"The header {name.decode('latin-1')} is there more than once. Send it once.",
    )


def _identifier(value: bytes | None) -> str | None:
    if value is None or not 0 < len(value) <= _MAX_ID_BYTES:
        return None
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None


def _forwarded_name(name: bytes) -> str | None:
    """Return the name under which a header is forwarded; None if it is dropped.

    Underscores count as hyphens, because some servers treat both alike.
    """
    plain = name.replace(b"_", b"-")
    if plain in _DROPPED or (plain.startswith(_DROPPED_PREFIXES) and plain != _PREFIX_KEY):
        return None
    return name.decode("ascii", "ignore")


_known_name = lru_cache(maxsize=1024)(_forwarded_name)


def _text(value: bytes) -> str | None:
    """Return a value as text that the client library encodes to the same bytes; None if there is none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _text_of_tokens(value: bytes) -> list[str]:
    return [token.strip().lower() for token in value.decode("latin-1").split(",")]


def response_headers(raw: Iterable[tuple[bytes, bytes]], own: Headers) -> Headers:
    """Return the headers of a service's response for the client, together with our own.

    All services answer under the gateway's host name. So a service may describe its answer, but set
    nothing for the host: no cookies, no redirects, no policies, none of the gateway's headers.

    Args:
        raw: the headers as the service sent them.
        own: headers that the gateway adds, in lower case.
    """
    ours = {name for name, _ in own}
    return [pair for pair in raw if _describes_answer(pair[0].lower(), ours)] + own


def _describes_answer(name: bytes, ours: set[bytes]) -> bool:
    return (name in _ANSWER or name.startswith(_ANSWER_PREFIXES)) and name not in ours
