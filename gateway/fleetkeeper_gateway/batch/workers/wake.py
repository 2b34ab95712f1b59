"""When lines of a batch wake a service that sleeps. Pure: the caller passes the time."""

from __future__ import annotations

from typing import Final

from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.model import BatchRecord

ALWAYS: Final = "always"
DEADLINE: Final = "deadline"


def wakes_at(batch: BatchRecord, start_p90_s: int | None) -> float:
    """Return the time, in Unix seconds, from which lines of a batch wake their service.

    It is half of the completion window, or earlier if the service starts slowly: two starts fit before the end.

    Worked example: a batch is created at 1,000 with a window of an hour, which ends at 4,600. Half of it has
    passed at 2,800. With starts of 1,200 s its lines wake the service from 4,600 - 2 * 1,200 = 2,200 on.
    """
    half = (batch.created + batch.expires) / 2
    return half if start_p90_s is None else min(half, batch.expires - 2 * start_p90_s)


def wake_of(batch: BatchRecord, route: Route, now: float) -> str | None:
    """Return the wake header of the lines of a batch; None if they do not wake their service."""
    if route.wake is not None:
        return route.wake
    return DEADLINE if now >= wakes_at(batch, route.start_p90_s) else None
