"""Authentication of requests for limits: bearer tokens signed by the operator, checked against public keys.

A token is a JWT, EdDSA, with `kid` in its header and the claims iss, aud (the pod's UID), iat, jti
and epoch (a number that rises with each new leader). It is accepted once, at most 60 s after it was
issued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jwt

MAX_AGE_S = 60.0
LEEWAY_S = 30.0
"""Maximum difference between the clocks of two machines."""
MAX_KEYS = 3
MAX_TOKEN_BYTES = 4096
KEYS_FILE = "jwks.json"


class UnauthorizedError(Exception):
    """The token is refused. The message is for our log; the caller does not receive it."""


@dataclass(frozen=True, slots=True)
class Bearer:
    """A token that was accepted."""

    epoch: int
    kid: str


def parse_keys(text: str) -> dict[str, jwt.PyJWK]:
    """Return the public Ed25519 keys of a JWKS by kid.

    Raises:
        ValueError: if it is not a JWKS of 1 to 3 Ed25519 public keys with different kids.
    """
    document = json.loads(text)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS:
        raise ValueError(f"expected a JWKS of 1 to {MAX_KEYS} keys")
    keys: dict[str, jwt.PyJWK] = {}
    for entry in listed:
        if (
            not isinstance(entry, dict)
            or entry.get("kty") != "OKP"
            or entry.get("crv") != "Ed25519"
        ):
            raise ValueError("only Ed25519 keys (kty OKP) are accepted")
        if "d" in entry:
            raise ValueError("the JWKS contains a private key; replace the key at once")
        kid = entry.get("kid")
        if not isinstance(kid, str) or not kid or kid in keys:
            raise ValueError("each key needs a unique kid")
        try:
            keys[kid] = jwt.PyJWK(entry, algorithm="EdDSA")
        except jwt.PyJWTError as error:
            raise ValueError(f"key {kid!r} cannot be read: {error}") from error
    return keys


def read_keys(directory: Path) -> dict[str, jwt.PyJWK]:
    """Return the keys in a mounted directory; none if the file does not exist.

    Raises:
        ValueError: if the file exists and is wrong.
        OSError: if it cannot be read.
    """
    file = directory / KEYS_FILE
    return parse_keys(file.read_text()) if file.exists() else {}


class Verifier:
    """Token check for one pod, with the used tokens and the newest epoch."""

    def __init__(self, audience: str, issuer: str) -> None:
        self._audience = audience
        self._issuer = issuer
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._used: dict[str, float] = {}
        self.epoch = 0
        """Epoch of the newest leader that presented a valid token."""

    @property
    def kids(self) -> tuple[str, ...]:
        """Return the trusted keys."""
        return tuple(sorted(self._keys))

    def trust(self, keys: Mapping[str, jwt.PyJWK]) -> None:
        """Replace the trusted keys."""
        self._keys = dict(keys)

    def verify(self, authorization: str | None, now: float) -> Bearer:
        """Return the bearer of an Authorization header. Its token cannot be used again.

        Raises:
            UnauthorizedError: if anything about it is wrong.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_BYTES:
            raise UnauthorizedError("no bearer token")
        claims, kid = self._signed_claims(token)
        issued, epoch, identifier = claims["iat"], claims.get("epoch"), claims["jti"]
        if not is_number(issued) or not -LEEWAY_S <= now - issued <= MAX_AGE_S + LEEWAY_S:
            raise UnauthorizedError("the token is too old or from the future")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise UnauthorizedError("the token has no epoch")
        if epoch < self.epoch:
            raise UnauthorizedError(f"epoch {epoch} is outdated, {self.epoch} is in force")
        self._use(identifier, now)
        self.epoch = epoch
        return Bearer(epoch, kid)

    def _signed_claims(self, token: str) -> tuple[dict[str, Any], str]:
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(kid) if isinstance(kid, str) else None
            if key is None or kid is None:
                raise UnauthorizedError(f"key {kid!r} is not trusted here")
            claims = jwt.decode(
                token,
                key,
                algorithms=["EdDSA"],
                audience=self._audience,
                issuer=self._issuer,
                # The age is checked here, with one clock for the claim and for the memory of used
                # tokens.
                options={
                    "require": ["iss", "aud", "iat", "jti"],
                    "verify_iat": False,
                    "verify_exp": False,
                    "verify_nbf": False,
                    "strict_aud": True,
                },
            )
        except jwt.PyJWTError as error:
            raise UnauthorizedError(f"the token is not valid: {error}") from error
        return claims, str(kid)

    def _use(self, identifier: object, now: float) -> None:
        if not isinstance(identifier, str) or not 8 <= len(identifier) <= 128:
            raise UnauthorizedError("jti must have 8 to 128 characters")
        self._used = {jti: until for jti, until in self._used.items() if until > now}
        if identifier in self._used:
            raise UnauthorizedError("the token was used before")
        # The maximum time for which a token can still pass the age check, with any iat.
        self._used[identifier] = now + MAX_AGE_S + 2 * LEEWAY_S


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a claim is a number. JSON's true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
