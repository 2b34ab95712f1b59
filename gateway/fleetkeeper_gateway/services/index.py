"""The known services by name and by model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleetkeeper_gateway.interfaces import Service
from fleetkeeper_gateway.kubernetes.watch import ObjectName
from fleetkeeper_gateway.services import metrics
from fleetkeeper_gateway.services.parse import parse_service


class ServiceIndex:
    """The reflector's sink for InferenceServices."""

    def __init__(self) -> None:
        self._services: dict[ObjectName, Service] = {}
        self._by_model: dict[str, tuple[Service, ...]] = {}

    def serving(self, model: str) -> Sequence[Service]:
        """Return the services that serve a model, of all namespaces."""
        return self._by_model.get(model, ())

    def named(self, namespace: str, name: str) -> Service | None:
        """Return a service by its name."""
        return self._services.get((namespace, name))

    def all(self) -> Iterable[Service]:
        """Return all services."""
        return self._services.values()

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        """Store a new or changed service."""
        service = parse_service(place, found)
        if self._services.get(place) != service:  # most writes change figures of the status
            self._replace(place, service)

    def remove(self, place: ObjectName) -> None:
        """Forget a service."""
        self._replace(place, None)

    def listed(self) -> None:
        """Do nothing: no reader waits for the end of a list."""

    def _replace(self, place: ObjectName, service: Service | None) -> None:
        old = self._services.pop(place, None)
        for model in old.models if old else ():
            kept = tuple(other for other in self._by_model[model] if other is not old)
            if kept:
                self._by_model[model] = kept
            else:
                del self._by_model[model]
        if service is not None:
            self._services[place] = service
            for model in service.models:
                self._by_model[model] = (*self._by_model.get(model, ()), service)
        metrics.SERVICES.set(len(self._services))
