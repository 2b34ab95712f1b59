"""IDs of attempts that only the gateway can make.

An engine runs in a tenant's pod, and its ledger names the key and the request of each entry. The ID
of the attempt ends in a code over the service, the request, the key and the tier, so an engine can
claim tokens only for requests that it was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

from fleetkeeper_gateway.grants.keys import KeyFiles

_NONCE_BYTES: Final = 12
_CODE_CHARACTERS: Final = 16
"""64 bits. A guess can only be tried by serving an entry, for one attempt each."""


def new_attempt(secret: bytes, service: str, request: str, key: str, tier: str) -> str:
    """Return the ID of a new attempt.

    Args:
        secret: of the key that signs its grant.
        service: NAMESPACE/NAME.
        request: ID of the request.
        key: ID of the client's key.
        tier: label of the tier.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    return nonce + _code(secret, nonce, service, request, key, tier)


class AttemptChecker:
    """Checks whether an attempt came from this gateway."""

    def __init__(self, keys: KeyFiles) -> None:
        self._keys = keys

    def is_ours(self, attempt: str, service: str, request: str, key: str, tier: str) -> bool:
        """Return whether the gateway sent this attempt of this request to this service."""
        keys = self._keys.keys()
        if keys is None:
            return False
        nonce, code = attempt[:-_CODE_CHARACTERS], attempt[-_CODE_CHARACTERS:]
        known = (keys.signing, keys.following)
        return any(
            hmac.compare_digest(
                _code(keys.attempt_secret, nonce, service, request, key, tier).encode(),
                code.encode(),
            )
            for keys in known
            if keys is not None
        )


def _code(secret: bytes, *parts: str) -> str:
    # No part contains a line end: names of Kubernetes, labels, and what this module made.
    text = "\n".join(parts).encode()
    return hmac.digest(secret, text, hashlib.sha256).hex()[:_CODE_CHARACTERS]
