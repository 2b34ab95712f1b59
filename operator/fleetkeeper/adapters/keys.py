"""Control keys: a pair of Ed25519 keys with which the operator signs and engines check its orders."""

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
    """The private key (PKCS 8, PEM) and the set of public keys (JWKS, JSON) that goes with it."""

    private_pem: str
    jwks: str

    def files(self) -> dict[str, str]:
        """Both, by the names under which the operator looks for them."""
        return {PRIVATE_FILE: self.private_pem, PUBLIC_FILE: self.jwks}


def new_control_keys() -> ControlKeys:
    """A new pair. The private half is nowhere but in the answer."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    jwks = {"keys": [public_jwk(key.public_key())]}
    return ControlKeys(pem.decode(), json.dumps(jwks, sort_keys=True, separators=(",", ":")))


def public_jwk(key: Ed25519PublicKey) -> dict[str, str]:
    """The public key as a JWK (RFC 8037); its `kid` is its thumbprint (RFC 7638).

    So a signer that holds only the private key knows the `kid` that engines know it by.
    """
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    members = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(raw)}
    canonical = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
    kid = _base64url(hashlib.sha256(canonical).digest())
    return {**members, "alg": "EdDSA", "kid": kid, "use": "sig"}


def _base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
