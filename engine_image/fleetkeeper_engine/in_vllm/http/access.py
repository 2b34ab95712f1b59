"""Access control: the API key, the supervisor's token, and callers on this machine.

The middleware is outside vLLM's own API-key check, so it checks the key itself before a request may
take a place in the queue.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from fleetkeeper_engine.in_vllm.http.asgi import Scope
from fleetkeeper_engine.in_vllm.vllm_settings import INTERNAL_HEADER

INTERNAL = INTERNAL_HEADER.encode()
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Access:
    """The secrets of one engine; an empty one is not set."""

    def __init__(self, internal_token: str, api_key: str) -> None:
        self._token = internal_token.encode()
        self._key = hashlib.sha256(api_key.encode()).digest() if api_key else None

    def is_internal(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the supervisor sent the request."""
        token = headers.get(INTERNAL)
        return bool(self._token) and token is not None and hmac.compare_digest(token, self._token)

    def is_authorized(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the request carries the API key, or none is needed."""
        if self._key is None:
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        # Not short-circuited: the time of an answer says nothing about the key.
        return hmac.compare_digest(digest, self._key) & (scheme.lower() == b"bearer")


def is_from_loopback(scope: Scope) -> bool:
    """Return whether the client is on this machine."""
    client = scope.get("client") or ("",)
    return client[0] in _LOOPBACK
