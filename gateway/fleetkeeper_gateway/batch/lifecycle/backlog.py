"""The services that get lines, and the backlog of each, for the operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import noted
from fleetkeeper_gateway.batch.interfaces import flow_of
from fleetkeeper_gateway.batch.lifecycle.life import Left
from fleetkeeper_gateway.batch.metrics import Due
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.routing import choose_service
from fleetkeeper_gateway.interfaces import KeyRefused, Keys, Services


class Destinations:
    """The services that the gateway chooses for lines."""

    def __init__(
        self, services: Services | None, keys: Keys, wall: Callable[[], float] = time.time
    ) -> None:
        """Take keys and services. Without services, lines go to another upstream than a gateway."""
        self._services = services
        self._keys = keys
        self._wall = wall

    def _chosen(self, key_id: str, model: str) -> tuple[str, str] | None:
        """Return namespace and name of the service; None if it is unknown or the gateway refuses the lines."""
        if self._services is None or not self._services.synced:
            return None
        try:
            key = self._keys.named(key_id, self._wall())
            service = choose_service(self._services, key, model, None)
        except (KeyRefused, Refusal):
            return None
        return service.namespace, service.name

    def route(self, key_id: str, model: str) -> str:
        """Return the route of a line: its service, or its flow while the service is unknown."""
        place = self._chosen(key_id, model)
        return flow_of(key_id, model) if place is None else f"service {'/'.join(place)}"

    def show(self, batches: Iterable[Left]) -> None:
        """Export the backlog of these batches, and remove the series of all others."""
        due: defaultdict[tuple[str, str], list[Due]] = defaultdict(list)
        for left in batches:
            record, validated = left.record, left.validated
            with noted("backlog", "a batch is missing in the backlog", batch=record.id):
                place = self._chosen(record.key_id, validated.model)
                if place is not None and left.lines:
                    tokens = validated.tokens * left.lines / validated.lines
                    due[place].append(Due(left.lines, tokens, float(record.expires)))
        metrics.show_backlog(due, self._wall())
