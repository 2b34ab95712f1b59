"""The one place that reads a clock. Everything else is given the time."""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import parsedate_to_datetime
from typing import Final, NoReturn

CLOSE_S: Final = 5.0
"""A machine's clock that is no further from the API server's at the start is as good as it."""
APART_S: Final = 30.0
"""Further from the API server's time than this, times of Kubernetes objects would be misread."""
APART_FOR_S: Final = 60.0
"""For so long every answer has to say so: one of several API servers may have a wrong clock."""


class ClockApart(RuntimeError):
    """The API server's clock was set: what this process remembers is of another time. It ends."""


class SystemClock:
    """The API server's time, carried on by the machine's monotonic clock, and some randomness.

    Times in Kubernetes objects are compared with it, so the machine's own wall clock, which may be
    wrong and may be set at any moment, only serves until the first answer of the API server.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._is_set = False
        self._apart_since: float | None = None
        self._apart_s = 0.0
        self._apart = asyncio.Event()
        self.machine_off_s = 0.0
        """How far the machine's wall clock was from the API server's at the start, 0 where it was close."""

    def now(self) -> float:
        """Seconds since the epoch. It never jumps."""
        return self._offset_s + time.monotonic()

    def monotonic(self) -> float:
        """Seconds since some fixed moment: for deadlines. It never jumps, and runs while stopped."""
        return time.monotonic()

    def process_cpu_s(self) -> float:
        """Seconds of processor time that this process has used."""
        return time.process_time()

    def jitter(self, seconds: float) -> float:
        """Between half of `seconds` and all of it, so that many who wait do not return together."""
        return seconds * (0.5 + random.random() / 2)  # noqa: S311 -- spreads load, guards no secret

    def observe_date(self, date: str) -> None:
        """Take the `Date` header of an answer of the API server; one that is no date is ignored."""
        try:
            moment = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError):
            return
        apart_s = moment + 0.5 - self.now()  # whole seconds, rounded down
        if not self._is_set:
            self._is_set = True
            self.machine_off_s = -apart_s if abs(apart_s) > CLOSE_S else 0.0
            self._offset_s -= self.machine_off_s
        elif abs(apart_s) <= APART_S:
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = time.monotonic()
        elif time.monotonic() - self._apart_since >= APART_FOR_S:
            self._apart_s = apart_s
            self._apart.set()

    async def keep(self) -> NoReturn:
        """Wait until the API server's clock was set.

        Raises:
            ClockApart: it was. A new process begins with the right time and without memory.
        """
        await self._apart.wait()
        raise ClockApart(f"the API server's clock was set by {self._apart_s:+.0f} s")
