"""Signs grants, and the tokens of the usage process and the batch process; verifies those that arrive.

Two kinds arrive: our own grants, which clients pass on, and tokens of the batch process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import jwt

from fleetkeeper_contract.grants import (
    ATTEMPT_CLAIM,
    BATCH_AUDIENCE,
    BATCH_ISSUER,
    BATCH_TYPE,
    GRANT_ISSUER,
    GRANT_LEEWAY_SECONDS,
    GRANT_MAX_SECONDS,
    GRANT_TYPE,
    HOPS_CLAIM,
    KEY_CLAIM,
    MAX_GRANT_BYTES,
    REQUEST_CLAIM,
    SERVICE_CLAIM,
    TIER_CLAIM,
    USAGE_TYPE,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.grants.attempts import new_attempt
from fleetkeeper_gateway.grants.keys import KeyFiles, SigningKey
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.interfaces import Service


class Signer:
    """A `GrantSigner` with the keys of a directory."""

    def __init__(self, keys: KeyFiles, wall: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._wall = wall

    def sign(
        self,
        service: Service,
        *,
        tier: Tier,
        key_id: str,
        request_id: str,
        hops: int,
    ) -> str:
        """Return a grant for a new attempt, valid for 60 s.

        Raises:
            NoGrantKeyError: if no key can sign.
        """
        key = self._keys.current()
        attempt = new_attempt(key.attempt_secret, service.path, request_id, key_id, tier.label)
        claims = {
            SERVICE_CLAIM: service.uid,
            ATTEMPT_CLAIM: attempt,
            REQUEST_CLAIM: request_id,
            TIER_CLAIM: tier.label,
            KEY_CLAIM: key_id,
            HOPS_CLAIM: hops,
        }
        return _signed(key, GRANT_TYPE, claims, self._wall())


class UsageTokenSigner:
    """Signs the tokens with which the usage process reads an engine's ledger."""

    def __init__(self, keys: KeyFiles, wall: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._wall = wall

    def sign(self, pod_uid: str) -> str:
        """Return a token for one request to the control port of one pod.

        Raises:
            NoGrantKeyError: if no key can sign.
        """
        claims = {"aud": pod_uid, "jti": secrets.token_urlsafe(16)}
        return _signed(self._keys.current(), USAGE_TYPE, claims, self._wall())


class BatchTokenSigner:
    """Signs the tokens with which the batch process sends requests on behalf of a key."""

    def __init__(self, keys: KeyFiles, wall: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._wall = wall

    def sign(self, key_id: str) -> str:
        """Return a token for requests of one key in tier batch, valid for 60 s.

        Raises:
            NoGrantKeyError: if no key can sign.
        """
        claims = {"iss": BATCH_ISSUER, "aud": BATCH_AUDIENCE, KEY_CLAIM: key_id}
        return _signed(self._keys.current(), BATCH_TYPE, claims, self._wall())


class BatchTokenReader:
    """Reads the tokens of the batch process."""

    def __init__(self, keys: KeyFiles, wall: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._wall = wall

    def key_of(self, token: str) -> str | None:
        """Return the ID of the key that a valid token names; None without a valid token."""
        claims = self._signed_claims(token)
        if claims is None:
            return None
        key, issued, expires = claims[KEY_CLAIM], claims["iat"], claims["exp"]
        if not isinstance(key, str) or type(issued) is not int or type(expires) is not int:
            return None
        if not 0 < expires - issued <= GRANT_MAX_SECONDS:
            return None
        now = self._wall()
        is_now = issued - GRANT_LEEWAY_SECONDS <= now <= expires + GRANT_LEEWAY_SECONDS
        return key if is_now else None

    def _signed_claims(self, token: str) -> dict[str, Any] | None:
        keys = self._keys.keys()
        if keys is None or len(token) > MAX_GRANT_BYTES:
            return None
        try:
            header = jwt.get_unverified_header(token)
            key = keys.trusted.get(str(header.get("kid")))
            if key is None or header.get("typ") != BATCH_TYPE:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=["EdDSA"],
                issuer=BATCH_ISSUER,
                audience=BATCH_AUDIENCE,
                # The times are checked against our own clock, for the longest time too.
                options={
                    "require": ["iss", "aud", "iat", "exp", KEY_CLAIM],
                    "strict_aud": True,
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                },
            )
        except jwt.PyJWTError:
            return None
        return claims


class GrantReader:
    """Verifies grants in a client's baggage, which show that the request came through a gateway before."""

    def __init__(self, keys: KeyFiles, wall: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._wall = wall

    def hops_of(self, grant: str) -> int | None:
        """Return the number of gateways that a grant of our own has passed; None if it is not ours."""
        keys = self._keys.keys()
        if keys is None or len(grant) > MAX_GRANT_BYTES:
            return None
        try:
            header = jwt.get_unverified_header(grant)
            key = keys.trusted.get(str(header.get("kid")))
            if key is None or header.get("typ") != GRANT_TYPE:
                return None
            claims = jwt.decode(
                grant,
                key,
                algorithms=["EdDSA"],
                issuer=GRANT_ISSUER,
                # The grant of the request before was for another service. A copied grant that has
                # expired must not make the request of its holder count as a loop.
                options={
                    "require": ["exp"],
                    "verify_aud": False,
                    "verify_exp": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError:
            return None
        hops, expires = claims.get(HOPS_CLAIM), claims["exp"]
        if type(hops) is not int or hops < 1 or type(expires) not in (int, float):
            return None
        return hops if self._wall() <= expires + GRANT_LEEWAY_SECONDS else None


def create_key_files(settings: GrantSettings) -> KeyFiles:
    """Return the keys that the settings name, for signers and readers of one process to share."""
    return KeyFiles(settings.grant_keys_directory, time.time, time.monotonic)


def _signed(key: SigningKey, kind: str, claims: dict[str, Any], now: float) -> str:
    issued = int(now)
    return jwt.encode(
        {
            "iss": GRANT_ISSUER,
            "iat": issued,
            "exp": issued + GRANT_MAX_SECONDS,
            **claims,
        },
        key.private,
        algorithm="EdDSA",
        headers={"typ": kind, "kid": key.kid},
    )
