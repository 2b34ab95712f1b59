"""The limit of concurrent lines of each route. Pure: the caller passes the time.

A route leads to one service, so a service that refuses lines slows down no line for another service.

A service answers 429 or 503 when it is full, often with Retry-After. The limit grows until then. A refusal
halves it, at most once for all the lines that were sent before the last halving, and nothing is sent until
Retry-After has passed. Afterwards the limit grows with each answer until it is near the refused number, and
slowly from there. A service that refuses everything, for example because its load breaker closed tier batch,
gets one line after each Retry-After until it accepts one. A service that sleeps gets one from its first refusal on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_FIRST: Final = 32
"""Limit at the start. A line may take minutes, so growth by answers alone would take too long."""
_GROWTH_S: Final = 0.5
"""Period in which the limit doubles at the start, if nothing is refused. Refusals arrive at once."""
_NEAR: Final = 0.85
"""Share of the refused number up to which the limit grows quickly again. From there it grows by steps."""
_STEPS: Final = 32
"""Number of round trips in which steps lead from 0 to the maximum."""
_MAX_PAUSE_S: Final = 300.0
_FIRST_PAUSE_S: Final = 0.5
_MAX_OWN_PAUSE_S: Final = 30.0
"""Maximum of the doubling pauses after refusals without Retry-After."""
_FAILURES: Final = 8
"""Consecutive failures that count as a refusal."""
_FORGET_S: Final = 600.0
_SILENT_S: Final = 300.0
"""Time without an answer to any running line after which no further line is sent."""


@dataclass(slots=True)
class Pace:
    """The pace of one route."""

    most: int
    running: int = 0
    limit: float = field(init=False)
    used: float = -math.inf
    """Time at which a line was last sent or ended."""
    flows: set[str] = field(default_factory=set)
    """Flows whose lines use this route."""
    _threshold: float = math.inf
    """Below this number the limit doubles; above, it grows by steps."""
    _cut: float = -math.inf
    _grown: float = -math.inf
    _until: float = -math.inf
    _filled: float = -math.inf
    """Time at which the limit was last reached. An unused limit does not grow."""
    _row: int = 0
    """Halvings since the last answer."""
    _failures: int = 0
    """Consecutive failed lines."""
    _heard: float = -math.inf
    """Time of the service's last answer, or of the start of the first running line."""

    def __post_init__(self) -> None:
        """Set the limit of the start."""
        self.limit = float(min(self.most, _FIRST))

    def free(self, now: float) -> int:
        """Return the number of further lines that may be sent now."""
        if self.rests(now):
            return 0
        self._grow_with_time(now)
        return max(0, int(self.limit) - self.running)

    def rests(self, now: float) -> float:
        """Return the time for which no line may be sent; infinite while the service is silent."""
        if self.running and now >= self._heard + _SILENT_S:
            # From there the limit grows by answers only.
            self.limit = self._threshold = min(self.limit, max(1.0, self.most / 2))
            return math.inf
        return max(0.0, self._until - now)

    def wakes(self, now: float) -> float:
        """Return the time at which `free` may grow without an event; infinite if it cannot."""
        if now < self._until:
            return self._until
        grows = self.limit < min(self._threshold, self.most) and self.running >= int(self.limit)
        return max(now, self._grown + _GROWTH_S) if grows else math.inf

    def slot(self, now: float) -> Slot:
        """Take a slot for a further line. Call its `ended` at the end."""
        if not self.running:
            self._heard = now
        self.running += 1
        self.used = now
        if self.running >= int(self.limit):
            self._filled = now
        if self._grown == -math.inf:
            self._grown = now
        return Slot(self, now)

    def ended(self, now: float) -> None:
        """Note the end of a line, after any outcome."""
        self.running -= 1
        self.used = now

    def answered(self, began: float, now: float) -> None:
        """Note an answer to a line that was sent at time `began`."""
        self._heard = now
        self._failures = 0
        if began > self._cut:
            self._row = 0
        elif self._row > 1:
            # Lines that were sent after the halving are refused too: answers to older lines prove nothing for them.
            return
        if began <= self._filled:
            step = 1.0 if self.limit < self._threshold else self.most / _STEPS / self.limit
            self.limit = min(float(self.most), self.limit + step)

    def refused(self, began: float, now: float, retry_after_s: float | None) -> None:
        """Note a refusal.

        Args:
            began: time at which the line was sent.
            now: the time.
            retry_after_s: Retry-After of the service; None or 0 without one.
        """
        self._heard = now
        if began > self._cut:
            if self._row == 0:
                self._threshold = max(1.0, self.limit * _NEAR)
            self.limit = max(1.0, self.limit / 2)
            self._row += 1
            self._cut = self._grown = now
        if not retry_after_s:
            # A pause of 0 would lead to the next refusal at once.
            exponent = min(max(0, self._row - 1), 10)
            retry_after_s = min(_MAX_OWN_PAUSE_S, _FIRST_PAUSE_S * 2**exponent)
        self._until = max(self._until, now + min(_MAX_PAUSE_S, retry_after_s))

    def asleep(self, now: float, retry_after_s: float | None) -> None:
        """Note that the service sleeps. One line is sent after each Retry-After until it is awake.

        Its refusals arrive at once, so the limit then doubles with time as at the start. They do not show how
        many lines it accepts, so the threshold stays.
        """
        self._heard = now
        self.limit, self._row, self._grown = 1.0, 0, -math.inf
        pause_s = min(_MAX_PAUSE_S, retry_after_s or _MAX_OWN_PAUSE_S)
        self._until = max(self._until, now + pause_s)

    def failed(self, began: float, now: float) -> None:
        """Note a failed line. Many consecutive failures count as a refusal: the service needs time.

        A single failure concerns the line only.
        """
        self._heard = now
        self._failures += 1
        if self._failures >= _FAILURES:
            self.refused(began, now, None)

    def _grow_with_time(self, now: float) -> None:
        most = min(self._threshold, self.most)
        is_refusing = self._row > 0
        if is_refusing or self.limit >= most or self.running < int(self.limit):
            return
        if now >= self._grown + _GROWTH_S:
            self._grown = now
            self.limit = min(most, self.limit * 2)


@dataclass(slots=True)
class Slot:
    """The slot of one line."""

    pace: Pace
    began: float
    """Time at which the line was sent; before that, at which it got the slot."""
    is_sent: bool = False

    def sent(self, now: float) -> None:
        """Note that the line is being sent."""
        self.is_sent, self.began = True, now


class Paces:
    """The paces of all routes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._paces: dict[str, Pace] = {}

    def of(self, route: str) -> Pace:
        """Return the pace of a route."""
        return self._paces.setdefault(route, Pace(self._most))

    def all(self) -> Mapping[str, Pace]:
        """Return the paces by route."""
        return self._paces

    @property
    def limit(self) -> int:
        """Return the sum of the limits of all routes."""
        return sum(math.floor(pace.limit) for pace in self._paces.values())

    def forget(self, now: float) -> None:
        """Drop routes without a line for a long time."""
        for route, pace in list(self._paces.items()):
            if pace.used == -math.inf:
                pace.used = now  # its first line is not sent yet
            elif pace.running == 0 and now - pace.used > _FORGET_S:
                del self._paces[route]

    def wakes(self, now: float) -> float:
        """Return the next time at which a further line may be sent; infinite if that needs an event."""
        return min((pace.wakes(now) for pace in self._paces.values()), default=math.inf)
