"""How many lines of a route may run at the same time. Pure: the caller brings the time.

A route leads to one service, so a service that refuses lines slows down none for another service.

A service says 429 or 503 when it takes no more, often with Retry-After. The number of lines grows
until it does. Then it is halved, at most once for all the lines that were sent before the last
halving, and nothing is sent until Retry-After has passed. After that it grows with each answer until
it is near what was refused, and slowly from there. A service that refuses everything, such
as one whose load breaker closed tier batch, gets one line after each Retry-After until it takes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_FIRST: Final = 32
"""Lines at the start. A line may take minutes, so growth by answers alone would take too long."""
_GROWTH_S: Final = 0.5
"""Time after which the number doubles at the start, if nothing was refused. A refusal comes at once."""
_NEAR: Final = 0.85
"""Part of the number at a refusal that is reached quickly again. From there it grows by steps."""
_STEPS: Final = 32
"""Round trips in which steps lead from nothing to the most."""
_LONGEST_PAUSE_S: Final = 300.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_OWN_PAUSE_S: Final = 30.0
"""Of the pauses that a refusal without Retry-After makes, which double."""
_FAILURES: Final = 8
"""Failures in a row that count as a refusal."""
_FORGET_S: Final = 600.0
_SILENT_S: Final = 300.0
"""Time without any answer to lines that run, after which no more are sent."""


@dataclass(slots=True)
class Pace:
    """The pace of one route."""

    most: int
    running: int = 0
    limit: float = field(init=False)
    used: float = -math.inf
    """When a line was last sent or ended."""
    flows: set[str] = field(default_factory=set)
    """Whose lines go this way."""
    _threshold: float = math.inf
    """Below it the limit doubles; above it, it grows by steps."""
    _cut: float = -math.inf
    _grown: float = -math.inf
    _until: float = -math.inf
    _filled: float = -math.inf
    """When the limit was last reached. What is not used does not grow."""
    _row: int = 0
    """Cuts since a line was last answered."""
    _failures: int = 0
    """Lines in a row that failed."""
    _heard: float = -math.inf
    """When the service last answered anything, or when the first of the lines began that run."""

    def __post_init__(self) -> None:
        """Begin with some lines."""
        self.limit = float(min(self.most, _FIRST))

    def free(self, now: float) -> int:
        """Return how many more lines may be sent now."""
        if self.rests(now):
            return 0
        self._grow_with_time(now)
        return max(0, int(self.limit) - self.running)

    def rests(self, now: float) -> float:
        """Return for how long no line may be sent; infinite if the service answers nothing."""
        if self.running and now >= self._heard + _SILENT_S:
            # From there it grows by answers alone.
            self.limit = self._threshold = min(self.limit, max(1.0, self.most / 2))
            return math.inf
        return max(0.0, self._until - now)

    def wakes(self, now: float) -> float:
        """Return when `free` may become more without an event; infinite if it does not."""
        if now < self._until:
            return self._until
        grows = self.limit < min(self._threshold, self.most) and self.running >= int(self.limit)
        return max(now, self._grown + _GROWTH_S) if grows else math.inf

    def slot(self, now: float) -> Slot:
        """Return the place of one more line. Call `ended` when it is over."""
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
        """Note the end of a line, however it ended."""
        self.running -= 1
        self.used = now

    def answered(self, began: float, now: float) -> None:
        """Note an answer to a line that was sent at a time."""
        self._heard = now
        self._failures = 0
        if began > self._cut:
            self._row = 0
        elif self._row > 1:
            # What was sent after the cut is refused too: old answers say nothing about new lines.
            return
        if began <= self._filled:
            step = 1.0 if self.limit < self._threshold else self.most / _STEPS / self.limit
            self.limit = min(float(self.most), self.limit + step)

    def refused(self, began: float, now: float, retry_after_s: float | None) -> None:
        """Note a refusal.

        Args:
            began: when the line was sent.
            now: the time.
            retry_after_s: what the service asks for; None or 0 if it does not say.
        """
        self._heard = now
        if began > self._cut:
            if self._row == 0:
                self._threshold = max(1.0, self.limit * _NEAR)
            self.limit = max(1.0, self.limit / 2)
            self._row += 1
            self._cut = self._grown = now
        if not retry_after_s:
            # 0 is no pause to make: the next refusal would follow at once.
            exponent = min(max(0, self._row - 1), 10)
            retry_after_s = min(_LONGEST_OWN_PAUSE_S, _FIRST_PAUSE_S * 2**exponent)
        self._until = max(self._until, now + min(_LONGEST_PAUSE_S, retry_after_s))

    def failed(self, began: float, now: float) -> None:
        """Note that a line failed. Many in a row count as a refusal: the service needs time.

        One that fails among others says something about the line alone.
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
    """The place of one line."""

    pace: Pace
    began: float
    """When the line was sent; before that, when it got the place."""
    is_sent: bool = False

    def sent(self, now: float) -> None:
        """Note that the line is sent."""
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
        """Return the most lines of all routes together."""
        return sum(math.floor(pace.limit) for pace in self._paces.values())

    def forget(self, now: float) -> None:
        """Forget routes of which no line ran for a long time."""
        for route, pace in list(self._paces.items()):
            if pace.used == -math.inf:
                pace.used = now  # its first line is yet to be sent
            elif pace.running == 0 and now - pace.used > _FORGET_S:
                del self._paces[route]

    def wakes(self, now: float) -> float:
        """Return when a line may be sent that may not be sent now; infinite if only an event allows it."""
        return min((pace.wakes(now) for pace in self._paces.values()), default=math.inf)
