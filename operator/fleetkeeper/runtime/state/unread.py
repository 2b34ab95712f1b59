"""Objects that exist but cannot be read, by the service that they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from fleetkeeper.adapters.kubernetes.records import Unread
from fleetkeeper.runtime.queue import Key
from fleetkeeper_kube.reading import Place

log = structlog.get_logger(__name__)

Address = tuple[str, str, str]
_NONE: Final[Mapping[Address, Unread]] = {}


def address_of(place: Place) -> Address:
    """Return kind, namespace and name."""
    return place.kind, place.namespace, place.name


class UnreadObjects:
    """The newest unreadable state of each object, until the object is read or deleted.

    An object without a readable service belongs to the service after which it is named, if any:
    children are called NAME and NAME-....
    """

    def __init__(self, services: Callable[[], Collection[Key]]) -> None:
        self._services = services
        self._homes: dict[Address, Key | None] = {}
        self._by_home: dict[Key | None, dict[Address, Unread]] = {}

    def put(self, found: Unread, home: Key | None) -> Key | None:
        """Record an unreadable object; return the service to reconcile for it, if there is one.

        `home` is the service that it belonged to when it was last read.
        """
        address = address_of(found)
        before = self._found(address)
        if before is not None and before.version >= found.version:
            return None
        if home is None:
            home = Key(found.namespace, found.service) if found.service else None
        self._drop(address)
        self._homes[address] = home
        self._by_home.setdefault(home, {})[address] = found
        home = home or self._named_after(found)
        if before is None or before.why != found.why:
            log.warning(
                "object unreadable",
                kind=found.kind,
                namespace=found.namespace,
                name=found.name,
                service=str(home) if home else "",
                why=found.why,
                hint="repair or delete it; until then nothing of its service is created, deleted or scaled",
            )
        return home

    def drop(self, address: Address, version: int) -> Key | None:
        """Forget an object that was read or deleted as of `version`; return its service, if any."""
        found = self._found(address)
        if found is None or found.version > version:
            return None
        home = self._homes[address] or self._named_after(found)
        self._drop(address)
        log.info(
            "object readable or deleted", kind=address[0], namespace=address[1], name=address[2]
        )
        return home

    def absent(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> list[Key]:
        """Forget the objects that a finished list did not contain; return their services."""
        lost = [
            address
            for address in self._homes
            if address[0] == kind
            and (namespace is None or address[1] == namespace)
            and address[1:] not in names
        ]
        homes = [self.drop(address, version) for address in lost]
        return [home for home in homes if home is not None]

    def of(self, key: Key) -> list[Unread]:
        """Return the unreadable objects of a service, sorted by kind and name."""
        found = list(self._by_home.get(key, _NONE).values())
        unclaimed = self._by_home.get(None, _NONE).values()
        found += [unread for unread in unclaimed if self._named_after(unread) == key]
        return sorted(found, key=address_of)

    def counts(self) -> Counter[str]:
        """Return the number of unreadable objects by kind."""
        return Counter(kind for kind, _, _ in self._homes)

    def _named_after(self, found: Unread) -> Key | None:
        fitting = [
            key
            for key in self._services()
            if key.namespace == found.namespace
            and (found.name == key.name or found.name.startswith(f"{key.name}-"))
        ]
        return max(fitting, key=lambda key: len(key.name), default=None)

    def _found(self, address: Address) -> Unread | None:
        if address not in self._homes:
            return None
        return self._by_home[self._homes[address]][address]

    def _drop(self, address: Address) -> None:
        if address in self._homes:
            home = self._homes.pop(address)
            del self._by_home[home][address]
            if not self._by_home[home]:
                del self._by_home[home]
