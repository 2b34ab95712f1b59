"""Times of the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _new() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the queue. No setting changes them; tests do."""

    lease_s: float = 30.0
    """Time after which a line is taken from a process that does not renew its lease."""
    lead_s: float = 30.0
    """The same for a task that one process does."""
    check_s: float = 1.0
    """Longest time between two checks of the server, and of expired leases."""
    retry_s: float = 1.0
    """Time between two attempts to connect, or to reach the store."""
    patience_s: float = 30.0
    """Time without progress after which another process makes the next epoch."""
    connect_s: float = 5.0
    """Time for the name, TCP, TLS and AUTH."""
    call_s: float = 10.0
    """Longest time of one call. Then the connection is given up."""
    process_s: float = 86_400.0
    """Time for which the server remembers what it told a process that is silent."""
    age_ms: Callable[[], int] = _new
    """Idle time with which leases begin. Tests turn their clock: what they subtract has passed."""
