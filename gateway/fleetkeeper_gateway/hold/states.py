"""For how long a service has been in a state of its sleep, as this process saw it, and when to come back."""

from __future__ import annotations

from typing import Final

from fleetkeeper_contract import sleep as contract
from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_gateway.interfaces import Service, Sleeping

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
    """Return the seconds after which a client that gets no answer now is to come back."""
    if sleep is None:
        return 1
    return contract.retry_after_s(sleep.starts, 0.0 if sleep.ends_by_mark else age_s)
