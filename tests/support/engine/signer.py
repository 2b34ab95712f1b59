"""An operator's signing key, for tests of engines."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ISSUER = "fleetkeeper"


class Signer:
    """An operator's key: writes its public half for the pod and signs limits requests."""

    def __init__(self, directory: Path, kid: str = "one") -> None:
        self.directory = directory
        self.kid = kid
        self.epoch = 1
        self._key = Ed25519PrivateKey.generate()
        directory.mkdir(parents=True, exist_ok=True)
        public = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(self._key.public_key()))
        self.jwk = {**public, "kid": kid, "alg": "EdDSA", "use": "sig"}
        (directory / "jwks.json").write_text(json.dumps({"keys": [self.jwk]}))

    def token(self, audience: str, **claims: object) -> str:
        """A fresh token for one pod; claims given replace the usual ones."""
        usual: dict[str, object] = {
            "iss": ISSUER,
            "aud": audience,
            "iat": time.time(),
            "jti": secrets.token_urlsafe(16),
            "epoch": self.epoch,
        }
        return jwt.encode(
            {**usual, **claims}, self._key, algorithm="EdDSA", headers={"kid": self.kid}
        )
