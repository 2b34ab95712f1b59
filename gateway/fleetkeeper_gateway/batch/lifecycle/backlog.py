"""The services that get lines, the backlog of each, for the operator, and which of them lines wake."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from fleetkeeper_contract.sleep import start_p90_s
from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import noted
from fleetkeeper_gateway.batch.interfaces import Route, flow_of
from fleetkeeper_gateway.batch.lifecycle.life import Left
from fleetkeeper_gateway.batch.metrics import Due
from fleetkeeper_gateway.batch.workers.wake import ALWAYS, DEADLINE, wakes_at
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.routing import choose_service
from fleetkeeper_gateway.interfaces import KeyRefused, Keys, Service, Services


class Destinations:
    """The services that the gateway chooses for lines."""

    def __init__(
        self, services: Services | None, keys: Keys, wall: Callable[[], float] = time.time
    ) -> None:
        """Take keys and services. Without services, lines go to another upstream than a gateway."""
        self._services = services
        self._keys = keys
        self._wall = wall
        self._wakes: set[str] = set()
        """Services with a batch whose lines wake them, while this process leads."""

    def _chosen(self, key_id: str, model: str) -> Service | None:
        """Return the service of lines; None if it is unknown or the gateway refuses the lines."""
        if self._services is None or not self._services.synced:
            return None
        try:
            key = self._keys.named(key_id, self._wall())
            return choose_service(self._services, key, model, None)
        except (KeyRefused, Refusal):
            return None

    def route(self, key_id: str, model: str) -> Route:
        """Return the route of a line: its service, or its flow while the service is unknown."""
        service = self._chosen(key_id, model)
        if service is None:
            return Route(flow_of(key_id, model))
        # One batch wakes the service for all lines: a worker process may hold only lines of other batches.
        deadline = DEADLINE if service.path in self._wakes else None
        wake = ALWAYS if service.wakes_for_batch else deadline
        return Route(f"service {service.path}", wake, _start_p90_s(service))

    def show(self, batches: Iterable[Left]) -> None:
        """Export the backlog of these batches, and remove the series of all others."""
        now, wakes = self._wall(), set[str]()
        due: defaultdict[tuple[str, str], list[Due]] = defaultdict(list)
        for left in batches:
            record, validated = left.record, left.validated
            with noted("backlog", "a batch is missing in the backlog", batch=record.id):
                service = self._chosen(record.key_id, validated.model)
                if service is not None and left.lines:
                    tokens = validated.tokens * left.lines / validated.lines
                    place = service.namespace, service.name
                    due[place].append(Due(left.lines, tokens, float(record.expires)))
                    if now >= wakes_at(record, _start_p90_s(service)):
                        wakes.add(service.path)
        self._wakes = wakes
        metrics.show_backlog(due, now)


def _start_p90_s(service: Service) -> int | None:
    return start_p90_s(service.sleep.starts) if service.sleep is not None else None
