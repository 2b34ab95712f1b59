"""The state of a key in one replica: locks and turns for its requests, and counts for its quotas.

Replicas do not lock one another. Two replicas that accept at the same moment may exceed a quota by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Final

from fleetkeeper_gateway.http.errors import Refusal, unavailable

MAX_UPLOADS: Final = 8
"""Maximum concurrent uploads of a key. Further ones wait, which bounds the unfinished files in the store."""
MAX_DOWNLOADS: Final = 8
"""Maximum concurrent downloads of a key. Further ones wait, which bounds the memory that slow readers hold."""
MAX_LISTS: Final = 2
"""Maximum concurrent lists of a key. Further ones wait. A list of 10,000 files may have 33 MB."""
MAX_OPEN: Final = 64
"""Maximum open calls of a key. Each may hold a part of a body, of 64 KiB."""
_MINUTE_S = 60.0


class KeyState:
    """The state of a key. It is never dropped: administrators create keys, so they are few."""

    def __init__(self) -> None:
        self.change = asyncio.Lock()
        """Held from the check of a quota to the change that depends on it."""
        self.uploads = asyncio.Semaphore(MAX_UPLOADS)
        self.downloads = asyncio.Semaphore(MAX_DOWNLOADS)
        self.lists = asyncio.Semaphore(MAX_LISTS)
        self.lines: dict[str, int] = {}
        """Maximum lines of each active batch, by ID."""
        self.room = 0
        """Number of batches that the key may add before all are counted again."""
        self._open = 0
        self._calls = 0.0
        """Level of a leaky bucket of calls. It holds the calls of a minute and drains evenly."""
        self._counted = 0.0

    @contextlib.contextmanager
    def open_call(self) -> Iterator[None]:
        """Count an open call.

        Raises:
            Refusal: if the key has too many open calls. OpenAI's client retries.
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
        """Take a call from the rate limit. `now`: monotonic seconds.

        Raises:
            Refusal: if the rate limit is reached.
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
