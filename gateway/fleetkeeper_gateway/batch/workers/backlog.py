"""What waits for each InferenceService, for the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import flow_of
from fleetkeeper_gateway.batch.metrics import Backlog, Due
from fleetkeeper_gateway.batch.workers.steps import Known
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.routing import choose_service
from fleetkeeper_gateway.interfaces import KeyRefused, Keys, Services

log = structlog.get_logger(__name__)


class BacklogReport:
    """Shows what is left of the active batches, by the service that their lines go to."""

    def __init__(
        self, backlog: Backlog, services: Services, keys: Keys, wall: Callable[[], float]
    ) -> None:
        self._backlog = backlog
        self._services = services
        self._keys = keys
        self._wall = wall

    def __call__(self, batches: Sequence[Known]) -> None:
        """Show these batches and no others. Without any, nothing is shown."""
        now = self._wall()
        due: dict[tuple[str, str], list[Due]] = {}
        for known in batches:
            try:
                place, left = self._place(known, now), _left(known)
            except Exception:
                metrics.DEFECTS.labels("backlog").inc()
                log.exception("a batch is missing in the backlog", batch=known.record.id)
                continue
            if place is not None and left is not None:
                due.setdefault(place, []).append(left)
        self._backlog.show(due, now)

    def _place(self, known: Known, now: float) -> tuple[str, str] | None:
        """Return the service that the gateway chooses; None if it refuses the lines."""
        if known.validated is None:
            return None
        return chosen(self._services, self._keys, known.record.key_id, known.validated.model, now)


def chosen(
    services: Services, keys: Keys, key_id: str, model: str, now: float
) -> tuple[str, str] | None:
    """Return namespace and name of the service that the gateway chooses for a line.

    None if it refuses the line, or if the services are not known yet.
    """
    if not services.synced:
        return None
    try:
        service = choose_service(services, keys.named(key_id, now), model, None)
    except (KeyRefused, Refusal):
        return None
    return service.namespace, service.name


def route_by(
    services: Services | None, keys: Keys, wall: Callable[[], float]
) -> Callable[[str, str], str]:
    """Return what names the route of a line, by its key and model.

    It is the service that the gateway chooses, or the flow where that is not known.
    """

    def route(key_id: str, model: str) -> str:
        place = None if services is None else chosen(services, keys, key_id, model, wall())
        return flow_of(key_id, model) if place is None else f"service {'/'.join(place)}"

    return route


def _left(known: Known) -> Due | None:
    validated = known.validated
    if validated is None or not known.outstanding or not validated.lines:
        return None
    tokens = validated.tokens * known.outstanding / validated.lines
    return Due(known.outstanding, tokens, float(known.record.expires))
