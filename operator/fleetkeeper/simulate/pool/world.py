"""Virtual time, the accelerators in use, and what became of the requests of one run."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fleetkeeper.simulate.closed_loop import EPOCH_S
from fleetkeeper.simulate.requests import Request

PATIENCE_S: Final = 300.0
"""Time for which a client tries to get one answer."""


class Asked(Request):
    """A request that its client may send more than once. `asked_at`: the time of the first try."""

    __slots__ = ("asked_at", "expires", "tries", "was_held")

    def __init__(self, request: Request) -> None:
        super().__init__(request.arrived, request.tier, request.prompt, request.generated)
        self.asked_at = request.arrived
        self.expires = self.asked_at
        """The end of its hold."""
        self.tries = 1
        self.was_held = False


@dataclass(slots=True)
class Tally:
    """The requests of one service, and the changes of its replicas."""

    requests: int = 0
    at_once: int = 0
    after_hold: int = 0
    after_retry: int = 0
    given_up: int = 0
    waits_s: list[float] = field(default_factory=list)
    """Waits of the answered requests that waited, from the first try to a replica."""
    sleeps: int = 0
    wakes: int = 0
    failed_starts: int = 0
    waking_s: float = 0.0
    """Time from the decision to wake to the first ready replica."""
    budget_wait_s: float = 0.0
    """Part of it before the budget allowed the replicas."""
    longest_turn_s: float = 0.0
    """The longest time for which clients waited and none got an answer."""

    def answered(self, request: Asked, now: float) -> None:
        """Count a request that a replica accepted."""
        if request.tries > 1:
            self.after_retry += 1
        elif request.was_held:
            self.after_hold += 1
        else:
            self.at_once += 1
        if now > request.asked_at:
            self.waits_s.append(now - request.asked_at)


class World:
    """The events of a run in the order of time, and the accelerators in use."""

    def __init__(self, seconds: float) -> None:
        self.now = EPOCH_S
        self.end = EPOCH_S + seconds
        """No request arrives later, and nothing is billed. Those that arrived still get their answers."""
        self.gpu_s = 0.0
        self.peak_gpus = 0
        self._gpus = 0
        self._billed = EPOCH_S
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def is_over(self) -> bool:
        """Return True after the end, while the last requests are answered."""
        return self.now > self.end

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Call `act` at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def every(self, period_s: float, act: Callable[[], None]) -> None:
        """Call `act` now, and again and again."""
        act()
        self.at(self.now + period_s, lambda: self.every(period_s, act))

    def use(self, more: int) -> None:
        """Change the number of accelerators in use."""
        until = min(self.now, self.end)
        self.gpu_s += self._gpus * (until - self._billed)
        self._billed = until
        self._gpus += more
        self.peak_gpus = max(self.peak_gpus, self._gpus)

    def run(self, tail_s: float) -> None:
        """Play until `tail_s` after the end."""
        while self._events and self._events[0][0] <= self.end + tail_s:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = self.end + tail_s
        self.use(0)
