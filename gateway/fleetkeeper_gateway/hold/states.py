"""For how long a service has been in a state of its sleep, as this process saw it, and when to come back."""

from __future__ import annotations

import math
from typing import Final

from fleetkeeper_contract.sleep import SleepState, start_p90_s
from fleetkeeper_gateway.interfaces import Service, Sleeping

MAX_RETRY_AFTER_S: Final = 60
_UNKNOWN_START_S: Final = 30
_MAX_SEEN: Final = 4096


class SeenStates:
    """When each state was first seen. No clock of another process counts."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[tuple[str, int, SleepState], float]] = {}

    def age_s(self, service: Service, now: float) -> float:
        """Return the seconds since the present state of a service was first seen; 0 while it is awake."""
        if service.sleep is None:
            self._first.pop(service.path, None)
            return 0.0
        state = (service.uid, service.sleep.number, service.sleep.state)
        seen = self._first.get(service.path)
        if seen is None or seen[0] != state:
            self._first.pop(service.path, None)
            if len(self._first) >= _MAX_SEEN:
                del self._first[next(iter(self._first))]
            seen = self._first[service.path] = (state, now)
        return now - seen[1]


def retry_after_s(sleep: Sleeping | None, age_s: float) -> int:
    """Return the seconds after which a client that gets no answer now is to come back.

    Worked example: of the starts 20, 30 and 40, 9 of 10 take at most 40 s. 15 s after the service began
    to wake, the client is to wait for 25 s.
    """
    if sleep is None:
        return 1
    start_s = start_p90_s(sleep.starts)
    if start_s is None:
        return _UNKNOWN_START_S
    passed_s = 0.0 if sleep.ends_by_mark else age_s
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(start_s - passed_s)))
