"""Control keys: the Ed25519 pair with which the operator signs and engines verify limits requests."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PRIVATE_FILE = "key.pem"
PUBLIC_FILE = "jwks.json"


@dataclass(frozen=True, slots=True)
class ControlKeys:
    """A private key (PKCS 8, PEM) and the matching set of public keys (JWKS, JSON)."""

    private_pem: str
    jwks: str

    def files(self) -> dict[str, str]:
        """Return both by the file names that the operator expects."""
        return {PRIVATE_FILE: self.private_pem, PUBLIC_FILE: self.jwks}


def new_control_keys() -> ControlKeys:
    """Return a new pair. The private key is stored nowhere else."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    jwks = {"keys": [public_jwk(key.public_key())]}
    return ControlKeys(pem.decode(), json.dumps(jwks, sort_keys=True, separators=(",", ":")))


def public_jwk(key: Ed25519PublicKey) -> dict[str, str]:
    """Return the public key as a JWK (RFC 8037); its `kid` is its thumbprint (RFC 7638).

    So a signer that has only the private key can compute the `kid` that engines expect.
    """
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    members = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(raw)}
    canonical = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
    kid = _base64url(hashlib.sha256(canonical).digest())
    return {**members, "alg": "EdDSA", "kid": kid, "use": "sig"}


def _base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
