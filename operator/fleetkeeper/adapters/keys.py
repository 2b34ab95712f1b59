"""Ed25519 keys whose public halves engines trust.

With a control key the operator signs limits requests, with a grant key the gateway signs grants.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.grants import (
    GRANT_JWKS_FILE,
    GRANT_LEEWAY_SECONDS,
    GRANT_MAX_SECONDS,
    NEXT_FILE,
    SIGN_FROM_FILE,
    SIGNING_FILE,
)

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
    return ControlKeys(_pem(key), _jwks([public_jwk(key.public_key())]))


def new_grant_keys() -> dict[str, str]:
    """Return the entries of a new Secret with grant keys. The private key is stored nowhere else."""
    key = Ed25519PrivateKey.generate()
    return {SIGNING_FILE: _pem(key), GRANT_JWKS_FILE: _jwks([public_jwk(key.public_key())])}


def rotated_grant_keys(files: Mapping[str, str], *, sign_from: float, now: float) -> dict[str, str]:
    """Return the entries of the Secret with a new key that signs from a time on.

    Engines trust the new key, the one that signs until then, and one that has just stopped.

    Args:
        files: the present entries.
        sign_from: Unix seconds, late enough that every engine trusts the new key by then.
        now: Unix seconds.

    Raises:
        ValueError: if the entries are invalid, or the previous rotation is not over.
    """
    listed = _listed(files)
    signing, since = files[SIGNING_FILE], 0.0
    if NEXT_FILE in files:
        since = rfc3339.parse(files.get(SIGN_FROM_FILE, "").strip()) or 0.0
        if now < since:
            raise ValueError(
                f"a rotation is under way: its key signs from {files[SIGN_FROM_FILE].strip()}; "
                "rotate again after that"
            )
        signing = files[NEXT_FILE]
    signs = _jwk_of(signing)
    if signs["kid"] not in listed:
        raise ValueError(f"{GRANT_JWKS_FILE} does not hold the key that signs, {signs['kid']}")
    new = Ed25519PrivateKey.generate()
    trusted = [public_jwk(new.public_key()), signs]
    # Grants of the key before may still be under way, unless it stopped signing long ago.
    if NEXT_FILE in files and now - since <= GRANT_MAX_SECONDS + GRANT_LEEWAY_SECONDS:
        trusted.append(_jwk_of(files[SIGNING_FILE]))
    return {
        SIGNING_FILE: signing,
        NEXT_FILE: _pem(new),
        SIGN_FROM_FILE: rfc3339.format(sign_from),
        GRANT_JWKS_FILE: _jwks(trusted),
    }


def _listed(files: Mapping[str, str]) -> set[str]:
    for name in (SIGNING_FILE, GRANT_JWKS_FILE):
        if not files.get(name):
            raise ValueError(f"{name} is missing or empty")
    try:
        document: Any = json.loads(files[GRANT_JWKS_FILE])
        return {entry["kid"] for entry in document["keys"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{GRANT_JWKS_FILE} is not a JWKS: {error}") from error


def _jwk_of(pem: str) -> dict[str, str]:
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("the key that signs is not an Ed25519 key in PEM")  # noqa: TRY004
    return public_jwk(key.public_key())


def _pem(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _jwks(keys: list[dict[str, str]]) -> str:
    return json.dumps({"keys": keys}, sort_keys=True, separators=(",", ":"))


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
