"""What one replica keeps of a key: turns, so that its requests do not overtake one another, and counts.

Between replicas nothing is locked. Two that accept at the same moment may exceed a quota by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Final

from fleetkeeper_gateway.http.errors import Refusal, unavailable

MAX_UPLOADS: Final = 8
"""Uploads of one key that are read at the same time. Others wait, so the store holds no more unfinished files."""
MAX_DOWNLOADS: Final = 8
"""Files of one key that are sent at the same time. Others wait, so slow readers hold no more parts in memory."""
MAX_LISTS: Final = 2
"""Lists of one key that are made and sent at the same time. One of 10,000 files may have 33 MB. Others wait."""
MAX_OPEN: Final = 64
"""Calls of one key that were begun and are not answered. Each may hold a part of a body, of 64 KiB."""
_MINUTE_S = 60.0


class KeyState:
    """The state of one key. It is never forgotten: keys are few, because operators make them."""

    def __init__(self) -> None:
        self.change = asyncio.Lock()
        """Held from a check of what the key has until the change that depends on it."""
        self.uploads = asyncio.Semaphore(MAX_UPLOADS)
        self.downloads = asyncio.Semaphore(MAX_DOWNLOADS)
        self.lists = asyncio.Semaphore(MAX_LISTS)
        self.lines: dict[str, int] = {}
        """The most lines that its active batches may have, by their ID."""
        self.room = 0
        """Batches that it may add before all of them are counted again."""
        self._open = 0
        self._calls = 0.0
        """Those that have not come back: a key has the calls of a minute, and they come back evenly."""
        self._counted = 0.0

    @contextlib.contextmanager
    def open_call(self) -> Iterator[None]:
        """Count a call while it is open.

        Raises:
            Refusal: if the key has too many. OpenAI's client tries again.
        """
        if self._open >= MAX_OPEN:
            raise unavailable(
                "too_many_open_calls",
                f"Your key has {MAX_OPEN} open calls about files and batches. Try again once one ended.",
                1,
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def take_call(self, per_minute: int, now: float) -> None:
        """Count a call, at a time in seconds that does not go back.

        Raises:
            Refusal: if the key has none left.
        """
        calls = max(0.0, self._calls - (now - self._counted) * per_minute / _MINUTE_S) + 1
        if calls > per_minute:
            wait_s = math.ceil((calls - per_minute) * _MINUTE_S / per_minute)
            raise Refusal(
                429,
                "call_quota_exceeded",
                f"Your key may make {per_minute} calls a minute about files and batches. "
                f"Try again in {wait_s} s.",
                headers={"retry-after": str(wait_s)},
            )
        self._calls, self._counted = calls, now
