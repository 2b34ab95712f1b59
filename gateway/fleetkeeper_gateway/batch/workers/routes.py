"""The routes of lines in a worker process: the service that answers the lines of a key for a model.

Only the parent watches keys and services, because a watch in each process would multiply the load on the API
server. Until the parent answers, which takes milliseconds, the flow stands for its service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from fleetkeeper_gateway.batch.interfaces import flow_of

_FRESH_S: Final = 5.0
_MOST: Final = 10_000


class Routes:
    """Routes from the parent. They only affect pace and rest, so an outdated route does no harm."""

    def __init__(
        self, ask: Callable[[str, str], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without routes. `ask` requests the route of a key and model from the parent; `note` gets the answer."""
        self._ask = ask
        self._monotonic = monotonic
        self._found: dict[str, str] = {}
        self._asked: dict[str, float] = {}

    def __call__(self, key_id: str, model: str) -> str:
        """Return the last known route of a line, and request it again if it is old."""
        flow, now = flow_of(key_id, model), self._monotonic()
        if now >= self._asked.get(flow, -math.inf) + _FRESH_S:
            if len(self._asked) >= _MOST:  # a key may name any number of models
                self._asked.clear()
                self._found.clear()
            self._asked[flow] = now
            self._ask(key_id, model)
        return self._found.get(flow, flow)

    def note(self, key_id: str, model: str, route: str) -> None:
        """Store an answer of the parent."""
        self._found[flow_of(key_id, model)] = route
