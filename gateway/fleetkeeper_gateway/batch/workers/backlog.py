"""What waits for each InferenceService, for the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetkeeper_gateway.batch.metrics import Backlog, Due
from fleetkeeper_gateway.batch.workers.steps import Known
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.routing import choose_service
from fleetkeeper_gateway.interfaces import KeyRefused, Keys, Services


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
            place, left = self._place(known, now), _left(known)
            if place is not None and left is not None:
                due.setdefault(place, []).append(left)
        self._backlog.show(due, now)

    def _place(self, known: Known, now: float) -> tuple[str, str] | None:
        """Return the service that the gateway chooses; None if it refuses the lines."""
        if known.validated is None or not self._services.synced:
            return None
        try:
            key = self._keys.named(known.record.key_id, now)
            service = choose_service(self._services, key, known.validated.model, None)
        except (KeyRefused, Refusal):
            return None
        return service.namespace, service.name


def _left(known: Known) -> Due | None:
    validated = known.validated
    if validated is None or not known.outstanding or not validated.lines:
        return None
    tokens = validated.tokens * known.outstanding / validated.lines
    return Due(known.outstanding, tokens, float(known.record.expires))
