"""Objects that were read by name, and that no watch shows: they lack our labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fleetkeeper.adapters.kubernetes.records import Unread
from fleetkeeper.reconcile.types import Child, Kind
from fleetkeeper.runtime.queue import Key

NAMED_S: Final = 20.0
"""Time for which such an object counts as existing."""


class NamedObjects:
    """The objects by service, each for `NAMED_S`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._named: dict[Key, dict[tuple[Kind, str], tuple[float, Child | Unread]]] = {}

    def put(self, key: Key, child: Child | Unread) -> None:
        """Remember an object that was read now."""
        self._named.setdefault(key, {})[Kind(child.kind), child.name] = (self._now(), child)

    def fresh(self, key: Key) -> list[Child | Unread]:
        """Return the objects that still count as existing."""
        named = self._named.get(key)
        if not named:
            return []
        oldest = self._now() - NAMED_S
        for name, (when, _) in list(named.items()):
            if when < oldest:
                del named[name]
        return [child for _, child in named.values()]

    def drop(self, key: Key, kind: Kind, name: str) -> None:
        """Forget an object that was changed since it was read."""
        self._named.get(key, {}).pop((kind, name), None)

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""
        self._named.pop(key, None)
