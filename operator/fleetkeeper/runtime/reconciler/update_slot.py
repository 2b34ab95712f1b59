"""The slot of automatic engine updates: one service at a time, until it is ready."""

from __future__ import annotations

from fleetkeeper.common.values import Manifest
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache


class UpdateSlot:
    """The service that may update its engine now, if any."""

    def __init__(self, cache: Cache, defects: Defects) -> None:
        self._cache = cache
        self._defects = defects
        self._holder: Key | None = None

    def is_held_by(self, key: Key, resource: Manifest) -> bool:
        """Return whether this service may update its engine; give it the slot if it is free."""
        status = resource.get("status") or {}
        wants = bool((status.get("engine") or {}).get("updateAvailable"))
        if self._holder is not None and self._cache.is_held(self._holder):
            self._holder = None
        if self._holder == key:
            if not wants and _is_settled(status):
                self._holder = None
            return True
        is_free = self._holder is None and self._defects.of(key) is None
        if wants and is_free and _updates_itself(resource) and _is_settled(status):
            self._holder = key
        return self._holder == key

    def release(self, key: Key) -> None:
        """Free the slot if this service holds it."""
        if self._holder == key:
            self._holder = None


def _updates_itself(resource: Manifest) -> bool:
    rollout = (resource.get("spec") or {}).get("rollout") or {}
    return bool(rollout.get("engineUpdates") == "Automatic")


def _is_settled(status: Manifest) -> bool:
    """Return whether the service is ready and no operation is in progress."""
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    return conditions.get("Ready") == "True" and conditions.get("Reconciling") != "True"
