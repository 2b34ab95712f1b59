"""The keys that sign grants: files of a mounted Secret, which may change while the process runs."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.grants import (
    GRANT_JWKS_FILE,
    MAX_GRANT_KEYS,
    NEXT_FILE,
    SIGN_FROM_FILE,
    SIGNING_FILE,
)

logger = logging.getLogger("fleetkeeper_gateway.grants")

CHECK_PERIOD_S = 1.0
"""Period of the check for changed files. A check without a change takes four stat calls."""
_ATTEMPTS = b"fleetkeeper attempt"
_FILES = (SIGNING_FILE, GRANT_JWKS_FILE, NEXT_FILE, SIGN_FROM_FILE)


class NoGrantKeyError(RuntimeError):
    """No key can sign: none is configured, or its files are invalid since the start."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, with the name by which engines know its public half."""

    kid: str
    private: Ed25519PrivateKey
    attempt_secret: bytes
    """Secret of the codes in attempt IDs, derived from the private key."""


@dataclass(frozen=True, slots=True)
class KeySet:
    """The content of the files at one time."""

    signing: SigningKey
    trusted: Mapping[str, Ed25519PublicKey]
    """Every public key that engines trust, by kid."""
    following: SigningKey | None = None
    sign_from: float = 0.0
    """Unix seconds from which `following` signs."""

    def current(self, now: float) -> SigningKey:
        """Return the key that signs at this time."""
        if self.following is not None and now >= self.sign_from:
            return self.following
        return self.signing


class KeyFiles:
    """The keys of a directory. If a file cannot be read, the last keys remain valid."""

    def __init__(
        self, directory: Path | None, wall: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._wall = wall
        self._monotonic = monotonic
        self._keys: KeySet | None = None
        self._seen: object = None
        self._problem = "FLEETKEEPER_GATEWAY_GRANT_KEYS_DIRECTORY is not set"
        self._checked = float("-inf")

    def current(self) -> SigningKey:
        """Return the key that signs now.

        Raises:
            NoGrantKeyError: if there is none.
        """
        keys = self.keys()
        if keys is None:
            raise NoGrantKeyError(
                f"no key signs grants: {self._problem}. Create the Secret with "
                "`fleetkeeper signing-keys create --grant-secret NAME` and mount it."
            )
        return keys.current(self._wall())

    def keys(self) -> KeySet | None:
        """Return the valid keys. The files are read again only after a change, and checked at most once a second."""
        now = self._monotonic()
        if self._directory is not None and now - self._checked >= CHECK_PERIOD_S:
            self._checked = now
            seen = _versions(self._directory)
            if seen != self._seen:
                self._read(self._directory, seen)
        return self._keys

    def _read(self, directory: Path, seen: object) -> None:
        try:
            self._keys = read_keys(directory)
        except (OSError, ValueError) as error:
            # An invalid version is not read again. A failed read is repeated.
            self._seen = seen if isinstance(error, ValueError) else None
            problem = f"{directory}: {error}"
            if problem != self._problem:
                kept = "the last keys stay in force" if self._keys else "no grant can be signed"
                logger.warning("grant keys in %s cannot be read, %s: %s", directory, kept, error)
            self._problem = problem
        else:
            self._seen, self._problem = seen, ""
            kids = ", ".join(sorted(self._keys.trusted))
            logger.info("grant keys read signing=%s trusted=%s", self._keys.signing.kid, kids)


def read_keys(directory: Path) -> KeySet:
    """Return the keys in a directory.

    Raises:
        ValueError: if a file is invalid or the files do not match.
        OSError: if a file cannot be read.
    """
    trusted = _trusted((directory / GRANT_JWKS_FILE).read_text())
    signing = _signing_key(directory / SIGNING_FILE, trusted)
    following = None
    sign_from = 0.0
    if (directory / NEXT_FILE).exists():
        following = _signing_key(directory / NEXT_FILE, trusted)
        sign_from = _time(directory / SIGN_FROM_FILE)
    return KeySet(signing, trusted, following, sign_from)


def _trusted(text: str) -> dict[str, Ed25519PublicKey]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{GRANT_JWKS_FILE} is not JSON: {error}") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_GRANT_KEYS:
        raise ValueError(f"{GRANT_JWKS_FILE} must be a JWKS of 1 to {MAX_GRANT_KEYS} keys")
    return dict(map(_public, listed))


def _public(entry: object) -> tuple[str, Ed25519PublicKey]:
    found = entry if isinstance(entry, dict) else {}
    kid = found.get("kid")
    if not isinstance(kid, str) or not kid or "d" in found:
        raise ValueError(f"each key of {GRANT_JWKS_FILE} must be public and have a kid")
    try:
        key = jwt.PyJWK(found, algorithm="EdDSA").key
    except jwt.PyJWTError as error:
        raise ValueError(f"key {kid!r} of {GRANT_JWKS_FILE} cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"key {kid!r} of {GRANT_JWKS_FILE} is not an Ed25519 key")  # noqa: TRY004
    return kid, key


def _signing_key(file: Path, trusted: Mapping[str, Ed25519PublicKey]) -> SigningKey:
    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # The error of the library may quote the file.
        raise ValueError(f"{file.name} is not a private key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{file.name} is not an Ed25519 key")  # noqa: TRY004
    own = key.public_key().public_bytes_raw()
    for kid, public in trusted.items():
        if public.public_bytes_raw() == own:
            secret = hmac.digest(key.private_bytes_raw(), _ATTEMPTS, hashlib.sha256)
            return SigningKey(kid, key, secret)
    raise ValueError(f"{GRANT_JWKS_FILE} does not hold the public half of {file.name}")


def _time(file: Path) -> float:
    text = file.read_text().strip()
    moment = rfc3339.parse(text)
    if moment is None:
        raise ValueError(f"{file.name} must be an RFC 3339 time, such as 2030-01-31T12:00:00Z")
    return moment


def _versions(directory: Path) -> tuple[tuple[int, int, int] | None, ...]:
    return tuple(map(_version, (directory / name for name in _FILES)))


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    # The kubelet replaces the directory behind a link, so the file's number changes too.
    return found.st_ino, found.st_mtime_ns, found.st_size
