"""The known keys by name and by digest.

A key is found by the SHA-256 of what the client sent. The time that this takes reveals no key, because
a client cannot choose the digest of a guess. So a dict is enough, and no comparison has to take constant time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from fleetkeeper_contract.client_key_entries import BadEntry
from fleetkeeper_gateway.interfaces import AuditLog, Key
from fleetkeeper_gateway.keys import metrics
from fleetkeeper_gateway.keys.parse import KeyRecord, actor_of, is_ending, parse_secret
from fleetkeeper_gateway.kubernetes.watch import ObjectName

log = structlog.get_logger(__name__)


class KeyStore:
    """The reflector's sink for the Secrets of one namespace."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._records: dict[str, KeyRecord] = {}
        self._owners: dict[bytes, set[str]] = {}
        """Names of the Secrets with a digest. A digest with more than one name is refused."""
        self._invalid: dict[str, str] = {}
        """Names of malformed Secrets, with the reason."""
        self._shared: set[str] = set()
        """Names of keys that share a digest with another key."""
        self._expiries: list[tuple[float, str]] = []
        self._looked: float | None = None
        self._is_listed = False

    @property
    def invalid(self) -> Mapping[str, str]:
        """Return the malformed Secrets, with the reason."""
        return self._invalid

    def __len__(self) -> int:
        """Return the number of valid keys."""
        return len(self._records)

    # -- questions --------------------------------------------------------------------------------

    def find(self, digest: bytes) -> KeyRecord | None:
        """Return the key with a digest; None if there is none, or if several Secrets have it."""
        owners = self._owners.get(digest, ())
        if len(owners) != 1:
            return None
        (name,) = owners
        return self._records[name]

    def named(self, name: str) -> Key | None:
        """Return the key with a name, if it exists and shares no digest."""
        return self._records[name].key if self.is_usable(name) else None

    def is_usable(self, name: str) -> bool:
        """Return whether the key exists and has a digest that no other key has."""
        record = self._records.get(name)
        return record is not None and any(
            len(self._owners[digest]) == 1 for digest in record.digests
        )

    def is_expired(self, name: str, now: float) -> bool:
        """Return whether the key has expired."""
        record = self._records.get(name)
        return record is not None and is_past(record.key.expires, now)

    # -- changes ----------------------------------------------------------------------------------

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        """Store the key of a new or changed Secret. A malformed Secret affects no other key."""
        name = place[1]
        if is_ending(found):
            self.remove(place)
            return
        actor = actor_of(found)
        was_known = name in self._records or name in self._invalid
        try:
            record = parse_secret(name, found)
        except BadEntry as problem:
            reason = str(problem)
            if self._invalid.get(name) != reason:
                log.warning("client key refused: its Secret is malformed", key=name, error=reason)
            changed = name in self._records
            self._replace(name, None)
            self._invalid[name] = reason
            if changed:
                self._note("changed", name, actor)
        else:
            old = self._records.get(name)
            self._invalid.pop(name, None)
            if record != old:
                self._replace(name, record)
                for change in _changes(old, record, was_known=was_known):
                    self._note(change, name, actor)
        self._show()

    def remove(self, place: ObjectName) -> None:
        """Revoke the key of a deleted Secret. The watch does not show who deleted it."""
        name = place[1]
        if name not in self._records and name not in self._invalid:
            return
        self._replace(name, None)
        self._invalid.pop(name, None)
        self._note("revoked", name, None)
        self._show()

    def listed(self) -> None:
        """Note the end of the first list: everything after it is a change."""
        self._is_listed = True
        self._show()

    def expire(self, now: float) -> None:
        """Report the keys that expired since the last call.

        Keys that expired before the first call are not events of this process, so they are not recorded.
        """
        since = now if self._looked is None else self._looked
        self._looked = now
        ended: dict[str, None] = {}  # a key that was changed is in the heap several times
        while self._expiries and self._expiries[0][0] <= now:
            moment, name = heapq.heappop(self._expiries)
            record = self._records.get(name)
            if record is not None and record.key.expires == moment and moment > since:
                ended[name] = None
        for name in ended:
            self._note("expired", name, None)

    def _replace(self, name: str, record: KeyRecord | None) -> None:
        """Store the record of a name; None removes it."""
        old = self._records.pop(name, None)
        touched = {name} | self._neighbours(old) | self._neighbours(record)
        for digest in old.digests if old else ():
            self._owners[digest].discard(name)
            if not self._owners[digest]:
                del self._owners[digest]
        if record is not None:
            self._records[name] = record
            for digest in record.digests:
                self._owners.setdefault(digest, set()).add(name)
            if record.key.expires is not None:
                heapq.heappush(self._expiries, (record.key.expires, name))
        self._mark_shared(touched)

    def _neighbours(self, record: KeyRecord | None) -> set[str]:
        """Return the names of the keys that share a digest with a record."""
        digests = record.digests if record else ()
        return {name for digest in digests for name in self._owners.get(digest, ())}

    def _mark_shared(self, names: Iterable[str]) -> None:
        for name in names:
            neighbours = self._neighbours(self._records.get(name)) - {name}
            if not neighbours:
                self._shared.discard(name)
            elif name not in self._shared:
                self._shared.add(name)
                log.error(
                    "client key refused: another Secret has the same digest; rotate one of them",
                    key=name,
                    others=sorted(neighbours),
                )

    def _note(self, change: str, name: str, actor: str | None) -> None:
        if self._is_listed:
            metrics.CHANGES.labels(change).inc()
            self._audit.change(key_id=name, change=change, actor=actor)

    def _show(self) -> None:
        metrics.KEYS.set(len(self._records) - len(self._shared))
        metrics.INVALID_KEYS.set(len(self._invalid) + len(self._shared))


def is_past(moment: float | None, now: float) -> bool:
    """Return whether a moment (None: never) has come."""
    return moment is not None and now >= moment


def _changes(old: KeyRecord | None, new: KeyRecord, *, was_known: bool) -> list[str]:
    if old is None:
        return ["changed" if was_known else "created"]
    found = []
    if (old.digests, old.old_until) != (new.digests, new.old_until):
        found.append("rotated")
    if old.without_digests() != new.without_digests():
        found.append("changed")
    return found
