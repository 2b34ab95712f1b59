"""Signature and claims of a grant.

The one module of the middleware that loads a library for signatures. It is imported once there are
keys, so an engine without a gateway loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import jwt

from fleetkeeper_contract.grants import (
    ATTEMPT_CLAIM,
    GRANT_ISSUER,
    GRANT_LEEWAY_SECONDS,
    GRANT_MAX_SECONDS,
    GRANT_TYPE,
    HOPS_CLAIM,
    KEY_CLAIM,
    MAX_GRANT_BYTES,
    MAX_HOPS,
    REQUEST_CLAIM,
    SERVICE_CLAIM,
    TIER_CLAIM,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.grants.identity import GrantIdentity
from fleetkeeper_engine.in_vllm.http.grants.refusals import GrantRefusedError
from fleetkeeper_engine.shm.layout import GrantRefusal

_TIERS = {tier.label: tier for tier in Tier}
_OPTIONS: Any = {
    "require": ["iss", SERVICE_CLAIM, "iat", "exp", ATTEMPT_CLAIM],
    # Times are checked here, for the maximum and for reasons of their own.
    "verify_iat": False,
    "verify_exp": False,
    "verify_nbf": False,
    "strict_aud": True,
}


class GrantVerifier:
    """Check of grants for one service."""

    def __init__(self, service: str, keys: Mapping[str, str]) -> None:
        """Use these public keys.

        Raises:
            ValueError: if a key cannot be read.
        """
        self._service = service
        self._keys = {kid: _key(kid, public) for kid, public in keys.items()}

    def verify(self, grant: str, now: float) -> GrantIdentity:
        """Return who sent the request.

        Raises:
            GrantRefusedError: if anything about the grant is wrong. Whether it was used is not known here.
        """
        claims = self._signed_claims(grant)
        _check_times(claims["iat"], claims["exp"], now)
        hops = claims.get(HOPS_CLAIM)
        if type(hops) is not int or not 1 <= hops <= MAX_HOPS:
            raise _invalid(f"It must have passed 1 to {MAX_HOPS} gateways.")
        tier = claims.get(TIER_CLAIM)
        if not isinstance(tier, str) or tier not in _TIERS:
            raise _invalid("Its tier is unknown.")
        return GrantIdentity(
            attempt=_identifier(claims, ATTEMPT_CLAIM, 8, 128),
            request=_identifier(claims, REQUEST_CLAIM, 1, 128),
            key=_identifier(claims, KEY_CLAIM, 1, 253),
            tier=_TIERS[tier],
            expires=float(claims["exp"]),
        )

    def _signed_claims(self, grant: str) -> dict[str, Any]:
        if len(grant) > MAX_GRANT_BYTES:
            raise _invalid(f"It is longer than {MAX_GRANT_BYTES} bytes.")
        try:
            header = jwt.get_unverified_header(grant)
            if header.get("typ") != GRANT_TYPE:
                raise _invalid("It is another kind of token.")
            key = self._keys.get(str(header.get("kid")))
            if key is None:
                raise _invalid("Its key is not trusted here.")
            return jwt.decode(
                grant,
                key,
                algorithms=["EdDSA"],
                audience=self._service,
                issuer=GRANT_ISSUER,
                options=_OPTIONS,
            )
        except jwt.InvalidAudienceError:
            raise _invalid("It is for another service.") from None
        except jwt.PyJWTError as error:
            raise _invalid("Its signature or its claims are wrong.") from error


def _key(kid: str, public: str) -> jwt.PyJWK:
    try:
        return jwt.PyJWK({"kty": "OKP", "crv": "Ed25519", "x": public}, algorithm="EdDSA")
    except jwt.PyJWTError as error:
        raise ValueError(f"key {kid!r} cannot be read: {error}") from error


def _check_times(issued: object, expires: object, now: float) -> None:
    if not _is_number(issued) or not _is_number(expires):
        raise _invalid("Its times must be numbers.")
    if not 0 < expires - issued <= GRANT_MAX_SECONDS:
        raise _invalid(f"It must be valid for at most {GRANT_MAX_SECONDS} s.")
    if issued - now > GRANT_LEEWAY_SECONDS:
        raise _invalid("It is from the future. Compare the clocks of the nodes.")
    if now - expires > GRANT_LEEWAY_SECONDS:
        raise GrantRefusedError(GrantRefusal.EXPIRED)


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _identifier(claims: Mapping[str, Any], name: str, shortest: int, longest: int) -> str:
    value = claims.get(name)
    if not isinstance(value, str) or not shortest <= len(value) <= longest:
        raise _invalid(f"{name} must have {shortest} to {longest} characters.")
    return value


def _invalid(why: str) -> GrantRefusedError:
    return GrantRefusedError(GrantRefusal.INVALID, why)
