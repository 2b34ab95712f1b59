"""ASGI types of the proxy, which is a plain ASGI callable: a framework would cost more than it saves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed the connection."""


def address_of(scope: Scope) -> str:
    """Return the client's address; empty if it is not known."""
    address: str = (scope.get("client") or ("",))[0]
    return address
