"""Authentication of requests for usage: bearer tokens signed with a grant key of the gateway.

A token is a JWT, EdDSA, with `typ` and `kid` in its header and the claims iss, aud (the pod's UID),
iat and exp, at most 60 s apart. A request only reads, so its token may be used again until it expires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jwt

from fleetkeeper_contract.grants import (
    GRANT_ISSUER,
    GRANT_LEEWAY_SECONDS,
    GRANT_MAX_SECONDS,
    MAX_GRANT_BYTES,
    USAGE_TYPE,
)
from fleetkeeper_engine.supervisor.control_api.auth import UnauthorizedError, is_number

_OPTIONS: Any = {
    "require": ["iss", "aud", "iat", "exp"],
    "verify_iat": False,
    "verify_exp": False,
    "verify_nbf": False,
    "strict_aud": True,
}


class UsageVerifier:
    """Token check for the usage of one pod."""

    def __init__(self, audience: str) -> None:
        self._audience = audience
        self._keys: Mapping[str, jwt.PyJWK] = {}

    def trust(self, keys: Mapping[str, str]) -> None:
        """Replace the trusted keys.

        Args:
            keys: public Ed25519 keys in base64url, by kid.

        Raises:
            ValueError: if a key cannot be read. The keys before stay trusted.
        """
        try:
            self._keys = {
                kid: jwt.PyJWK({"kty": "OKP", "crv": "Ed25519", "x": public}, algorithm="EdDSA")
                for kid, public in keys.items()
            }
        except jwt.PyJWTError as error:
            raise ValueError(f"a grant key cannot be read: {error}") from error

    def verify(self, authorization: str | None, now: float) -> str:
        """Return the kid of the key that signed the token of an Authorization header.

        Args:
            authorization: the header's value; None if absent.
            now: Unix seconds.

        Raises:
            UnauthorizedError: if anything about it is wrong. The message is for our log.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_GRANT_BYTES:
            raise UnauthorizedError("no bearer token")
        try:
            header = jwt.get_unverified_header(token)
            kid = str(header.get("kid"))
            if header.get("typ") != USAGE_TYPE:
                raise UnauthorizedError("the token is of another type")
            if kid not in self._keys:
                raise UnauthorizedError(f"key {kid!r} is not trusted here")
            claims = jwt.decode(
                token,
                self._keys[kid],
                algorithms=["EdDSA"],
                audience=self._audience,
                issuer=GRANT_ISSUER,
                options=_OPTIONS,
            )
        except jwt.PyJWTError as error:
            raise UnauthorizedError(f"the token is not valid: {error}") from error
        _check_times(claims["iat"], claims["exp"], now)
        return kid


def _check_times(issued: object, expires: object, now: float) -> None:
    if not is_number(issued) or not is_number(expires):
        raise UnauthorizedError("the token's times are not numbers")
    if not 0 < expires - issued <= GRANT_MAX_SECONDS:
        raise UnauthorizedError(f"the token is valid for more than {GRANT_MAX_SECONDS} s")
    if not issued - GRANT_LEEWAY_SECONDS <= now <= expires + GRANT_LEEWAY_SECONDS:
        raise UnauthorizedError("the token has expired or is from the future")
