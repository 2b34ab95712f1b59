"""The sink of the service watch, which stores services in the cache."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper_kube.reading import Unreadable, place_of, text

log = structlog.get_logger(__name__)


class ServiceWatch(Protocol):
    """The watch of InferenceServices: `fleetkeeper.events.watch_services`."""

    def __call__(
        self,
        sink: ServiceFeed,
        *,
        namespaces: tuple[str, ...],
        kubeconfig: Path | None,
        after_start: Callable[[], None],
    ) -> Coroutine[Any, Any, None]:
        """Watch until cancelled; raise if the watch ends."""


@dataclass(frozen=True, slots=True)
class ServiceFeed:
    """The sink of the service watch."""

    cache: Cache
    defects: Defects
    on_relist: Callable[[], None]

    def changed(self, live: Mapping[str, Any]) -> None:
        """Store an added or modified service."""
        with self.defects.contained("service_event", _key_of(live)):
            self.cache.put_service(live)

    def deleted(self, live: Mapping[str, Any]) -> None:
        """Remove a deleted service."""
        try:
            place = place_of(INFERENCE_SERVICE.kind, live)
        except Unreadable as problem:
            log.warning("deleted service has no readable name: resync queued", why=str(problem))
            self.on_relist()
            return
        key = Key(place.namespace, place.name)
        with self.defects.contained("service_event", key):
            uid = text(live["metadata"].get("uid"))
            self.cache.drop_service(key, uid=uid, version=place.version)

    def relisted(self) -> None:
        """Handle a finished list, which does not show what was deleted."""
        self.on_relist()


def _key_of(live: Mapping[str, Any]) -> Key:
    meta = live.get("metadata") or {}
    return Key(str(meta.get("namespace", "")), str(meta.get("name", "")))
