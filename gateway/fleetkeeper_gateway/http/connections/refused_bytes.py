"""Bytes of refused requests by source, which bound the cost of clients that reach no limit of their key."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from fleetkeeper_gateway.http.errors import LIMIT_REACHED, Refusal

MIN_BYTES: Final = 8192
"""Minimum bytes of a refused request: its head costs as much as a small body."""
BYTES_PER_S: Final = 4 * 1024**2
MAX_BYTES: Final = 16 * 1024**2
"""Size of the bucket: refused bytes in a burst."""
MAX_SOURCES: Final = 8192


class RefusedBytes:
    """A bucket for each source: a key, or the address of a client without one.

    A request that ends with 400, 404, 413 or 429 takes nothing from the limits of its key, but costs as much
    CPU time as a served request. A source whose bucket is empty is refused before its body is read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owed: dict[str, tuple[float, float]] = {}
        """Owed bytes by source, with the time of that figure."""

    def __len__(self) -> int:
        """Return the number of sources in memory."""
        return len(self._owed)

    def add(self, source: str, size: int) -> None:
        """Count a refused request."""
        now = self._clock()
        owed = self._owed_at(source, now) + max(MIN_BYTES, size)
        # The end of the order is the latest.
        self._owed.pop(source, None)
        self._owed[source] = (owed, now)
        if len(self._owed) > MAX_SOURCES:
            del self._owed[next(iter(self._owed))]

    def wait_s(self, source: str) -> float:
        """Return the seconds until requests of a source are read again; 0 if they are read now."""
        if source not in self._owed:
            return 0.0
        owed = self._owed_at(source, self._clock())
        if not owed:
            del self._owed[source]
        return max(0.0, owed - MAX_BYTES) / BYTES_PER_S

    def check(self, source: str) -> None:
        """Check that a source's next request may be read.

        Raises:
            Refusal: if too many of its requests were refused.
        """
        wait_s = self.wait_s(source)
        if wait_s > 0:
            raise Refusal(
                429,
                LIMIT_REACHED,
                "Too many requests of this key were refused. Correct them, and send fewer.",
                kind="rate_limit_error",
                headers={"retry-after": str(math.ceil(wait_s))},
                details={"limit": "refused"},
            )

    def _owed_at(self, source: str, now: float) -> float:
        owed, at = self._owed.get(source, (0.0, now))
        return max(0.0, owed - (now - at) * BYTES_PER_S)
