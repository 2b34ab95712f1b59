"""Parses a key from its Secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleetkeeper_contract.client_key_entries import BadEntry, decoded_entries, parse_entries
from fleetkeeper_contract.client_keys import ANONYMOUS
from fleetkeeper_contract.tiers import TIER_BY_LABEL
from fleetkeeper_gateway.interfaces import Key
from fleetkeeper_gateway.keys.limits import limits_by_tier

MAX_ACTOR = 128


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key with the digests of its secret."""

    key: Key
    digests: tuple[bytes, ...]
    """The digest; during a rotation the old and the new digest."""
    old_until: float | None = None
    """Unix seconds until which the first of two digests is accepted; None: no end."""

    def accepts(self, digest: bytes, now: float) -> bool:
        """Return whether the digest is accepted at this time."""
        is_old = len(self.digests) == 2 and digest == self.digests[0]
        if is_old and self.old_until is not None and now >= self.old_until:
            return False
        return digest in self.digests

    def without_digests(self) -> KeyRecord:
        """Return the record without the fields that a rotation changes, for comparison."""
        return replace(self, digests=(), old_until=None)


def parse_secret(name: str, secret: Mapping[str, Any]) -> KeyRecord:
    """Return the key of a Secret.

    Raises:
        BadEntry: the Secret describes no key. The message contains none of its values.
    """
    if name == ANONYMOUS:
        raise BadEntry(f"the name {ANONYMOUS} is reserved; give the Secret another name")
    found = parse_entries(decoded_entries(secret.get("data")), default_name=name)
    key = Key(
        id=name,
        name=found.name,
        namespaces=frozenset(found.namespaces),
        models=found.models,
        highest=TIER_BY_LABEL[found.highest_tier],
        expires=found.expires,
        limits=limits_by_tier(
            found.requests_per_minute, found.tokens_per_minute, found.concurrency
        ),
    )
    return KeyRecord(key, tuple(map(bytes.fromhex, found.digests)), found.old_until)


def is_ending(secret: Mapping[str, Any]) -> bool:
    """Return whether the Secret is being deleted: the key is revoked even if a finalizer keeps it."""
    return bool(_metadata(secret).get("deletionTimestamp"))


def actor_of(secret: Mapping[str, Any]) -> str | None:
    """Return the field manager that wrote the Secret last, None if that is unknown.

    It is the name that the writing program gave itself, not the identity of a person.
    """
    entries = _metadata(secret).get("managedFields")
    dated = [
        (str(entry.get("time") or ""), str(entry["manager"])[:MAX_ACTOR])
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, Mapping) and entry.get("manager")
    ]
    return max(dated, key=lambda pair: pair[0])[1] if dated else None


def _metadata(secret: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = secret.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}
