"""The key of an Authorization header."""

from __future__ import annotations

import hashlib

from fleetkeeper_contract.client_key_entries import is_key
from fleetkeeper_gateway.interfaces import KeyRefused

MISSING = "missing_api_key"
INVALID = "invalid_api_key"
EXPIRED = "expired_api_key"
UNAVAILABLE = "keys_unavailable"
"""Error code while no key can be checked: 503, and the client may try again."""


def invalid(key_id: str | None = None) -> KeyRefused:
    """Return the refusal of a key that is not accepted. It is the same for all reasons."""
    return KeyRefused(INVALID, "The API key is not valid.", key_id)


def digest_of_header(authorization: str | None) -> bytes:
    """Return the SHA-256 of the key in the header.

    Raises:
        KeyRefused: there is no key, or it does not have the form of one.
    """
    if not authorization:
        raise KeyRefused(
            MISSING,
            "You provided no API key. Send it in the header Authorization: Bearer YOUR_KEY.",
        )
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not is_key(token):
        raise invalid()
    return hashlib.sha256(token.encode()).digest()
