"""A gateway's keys for tests of engines: writes grants.json and signs grants, right or wrong ones."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.keys import public_jwk
from fleetkeeper_contract.grants import GRANT_ISSUER, GRANT_TYPE, GRANTS_FILE, USAGE_TYPE

SERVICE = "service-uid"


class GrantKey:
    """One key of a gateway."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.private = Ed25519PrivateKey.generate()
        self.jwk = public_jwk(self.private.public_key())

    def grant(self, *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A fresh grant; claims given replace the usual ones, and None removes them."""
        now = int(self.clock())
        usual = {
            "iss": GRANT_ISSUER,
            "aud": SERVICE,
            "iat": now,
            "exp": now + 60,
            "jti": secrets.token_hex(16),
            "rid": "request-1",
            "tier": "standard",
            "key": "key-1",
            "hops": 1,
        }
        return self._signed({**usual, **claims}, {"typ": GRANT_TYPE, **(header or {})})

    def usage_token(
        self, pod_uid: str, *, header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """A fresh token that reads the usage of one pod."""
        now = int(self.clock())
        usual = {"iss": GRANT_ISSUER, "aud": pod_uid, "iat": now, "exp": now + 60}
        return self._signed({**usual, **claims}, {"typ": USAGE_TYPE, **(header or {})})

    def _signed(self, claims: dict[str, Any], header: dict[str, Any]) -> str:
        kept = {name: value for name, value in claims.items() if value is not None}
        named = {"kid": self.jwk["kid"], **header}
        headers = {name: value for name, value in named.items() if value is not None}
        return jwt.encode(kept, self.private, algorithm="EdDSA", headers=headers)


def grants_text(*keys: GrantKey, demanded: bool = True, service: str = SERVICE) -> str:
    """The content of grants.json."""
    return json.dumps({"demanded": demanded, "service": service, "keys": [key.jwk for key in keys]})


def write_grants(directory: Path, text: str) -> Path:
    """Replace grants.json, as the kubelet does: another file under the same name."""
    file = directory / GRANTS_FILE
    new = directory / ".new"
    new.write_text(text)
    return new.replace(file)


def bearer(grant: str) -> list[tuple[bytes, bytes]]:
    """The header of a grant, in ASGI's form."""
    return [(b"authorization", f"Bearer {grant}".encode())]


def baggage(grant: str, before: str = "") -> list[tuple[bytes, bytes]]:
    """The grant as an entry of W3C Baggage, after other entries."""
    return [(b"baggage", f"{before}fleetkeeper-grant={grant}".encode())]
