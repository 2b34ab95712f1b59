"""Aggregation of the same event on many services into one event for the fleet.

A Prometheus outage is one fact. A hundred events about it hide the events that concern one service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from fleetkeeper.common.values import Event
from fleetkeeper.runtime.queue import Key

SHARED: Final = frozenset(
    {
        "PrometheusLost",
        "PrometheusBack",
        "ControlBreakerOpen",
        "ControlBreakerHalfOpen",
        "ControlBreakerClosed",
    }
)
"""Reasons whose cause may lie outside of the services. Only these are aggregated."""
GATHER_S: Final = 15.0
"""Services detect the same outage within three ticks, by the age of their samples."""
FEW: Final = 3
"""Up to this many services get an event each."""
AGAIN_S: Final = 600.0
"""Time between two fleet events with the same text. Services added meanwhile wait for the next one."""
NAMED: Final = 5


@dataclass(slots=True)
class _Group:
    """Services with the same event, and when it was last posted for the fleet."""

    since: float = 0.0
    keys: dict[Key, None] = field(default_factory=dict)
    recorded: float = float("-inf")


class FleetEvents:
    """Events with the same text, gathered for `GATHER_S`, then posted by `post` or `post_fleet`."""

    def __init__(
        self, post: Callable[[Key, Event], None], post_fleet: Callable[[Event], None]
    ) -> None:
        self._post = post
        self._post_fleet = post_fleet
        self._groups: dict[Event, _Group] = {}

    def add(self, key: Key, event: Event, now: float) -> None:
        """Gather an event; post it at once if it only concerns its service."""
        if event.reason not in SHARED:
            self._post(key, event)
            return
        group = self._groups.setdefault(event, _Group())
        if not group.keys:
            group.since = now
        group.keys[key] = None

    def flush(self, now: float) -> None:
        """Post the events that were gathered for long enough."""
        for event, group in list(self._groups.items()):
            is_recent = now - group.recorded < AGAIN_S
            if not group.keys and not is_recent:
                del self._groups[event]
            elif group.keys and now - group.since >= GATHER_S and not is_recent:
                self._post_group(event, group, now)

    def _post_group(self, event: Event, group: _Group, now: float) -> None:
        keys, group.keys = sorted(group.keys), {}
        if len(keys) <= FEW:
            for key in keys:
                self._post(key, event)
            return
        group.recorded = now
        named = ", ".join(map(str, keys[:NAMED]))
        rest = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        text = f"{len(keys)} services: {event.message}. Services: {named}{rest}"
        self._post_fleet(replace(event, message=text))
