"""The routes of lines in a worker process: the service that answers the lines of a key for a model.

Only the parent watches keys and services, because a watch in each process would multiply the load on the API
server. Until the parent answers, which takes milliseconds, the flow stands for its service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from fleetkeeper_gateway.batch.interfaces import Route, flow_of
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.workers.wake import wake_of

_FRESH_S: Final = 5.0
_MOST: Final = 10_000


class Routes:
    """Routes from the parent. They only affect pace, rest and wake, so an outdated route does no harm."""

    def __init__(
        self,
        ask: Callable[[str, str], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start without routes. `ask` requests the route of a key and model from the parent; `note` gets the answer."""
        self._ask = ask
        self._monotonic = monotonic
        self._wall = wall
        self._found: dict[str, Route] = {}
        self._asked: dict[str, float] = {}

    def __call__(self, key_id: str, model: str) -> str:
        """Return the last known service of a line, and request it again if it is old."""
        return self._route(key_id, model).name

    def wake(self, batch: BatchRecord, model: str) -> str | None:
        """Return the wake header of the lines of a batch now; None if they wake no service."""
        return wake_of(batch, self._route(batch.key_id, model), self._wall())

    def note(self, key_id: str, model: str, route: Route) -> None:
        """Store an answer of the parent."""
        self._found[flow_of(key_id, model)] = route

    def _route(self, key_id: str, model: str) -> Route:
        flow, now = flow_of(key_id, model), self._monotonic()
        if now >= self._asked.get(flow, -math.inf) + _FRESH_S:
            if len(self._asked) >= _MOST:  # a key may name any number of models
                self._asked.clear()
                self._found.clear()
            self._asked[flow] = now
            self._ask(key_id, model)
        return self._found.get(flow) or Route(flow)
