"""The only module that reads a clock. Everything else gets the time as an argument."""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import parsedate_to_datetime
from typing import Final, NoReturn

CLOSE_S: Final = 5.0
"""A machine's clock within this distance of the API server's at the start counts as correct."""
APART_S: Final = 30.0
"""Beyond this distance from the API server's time, times in Kubernetes objects would be misread."""
APART_FOR_S: Final = 60.0
"""Every response must show the distance for this long: one of several API servers may be wrong."""


class ClockApart(RuntimeError):
    """A change of the API server's clock. The times that this process remembers are invalid; it ends."""


class SystemClock:
    """The API server's time, continued by the machine's monotonic clock, and jitter.

    It is compared with times in Kubernetes objects. The machine's own wall clock may be wrong and may
    be set at any moment, so it is used only until the first response of the API server.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._is_set = False
        self._apart_since: float | None = None
        self._apart_s = 0.0
        self._apart = asyncio.Event()
        self.machine_off_s = 0.0
        """Seconds by which the machine's wall clock was ahead of the API server's at the start; 0 if close."""

    def now(self) -> float:
        """Return the seconds since the epoch. They never jump."""
        return self._offset_s + time.monotonic()

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment, for deadlines.

        They never jump, and also count while the process is stopped.
        """
        return time.monotonic()

    def jitter(self, seconds: float) -> float:
        """Return between half of `seconds` and all of it, so that many waits do not end together."""
        return seconds * (0.5 + random.random() / 2)  # noqa: S311 -- spreads load, guards no secret

    def observe_date(self, date: str) -> None:
        """Read the `Date` header of a response of the API server; ignore one that is not a date."""
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
        """Wait until the API server's clock is set.

        Raises:
            ClockApart: it was set. A new process starts with the right time and without memory.
        """
        await self._apart.wait()
        raise ClockApart(f"the API server's clock changed by {self._apart_s:+.0f} s")
