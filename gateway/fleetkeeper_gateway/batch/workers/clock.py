"""The time of deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Unix seconds that never go back in one process.

    A clock that is set back must not bring an expired batch to life: some of its lines are already
    given up. A clock that is set forward expires batches early; nothing can undo that.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._latest = 0.0

    def __call__(self) -> float:
        """Return the time."""
        self._latest = max(self._latest, self._wall())
        return self._latest
