"""Arrival counts by tier: each request once, in bins of 1 s. Pure."""

from __future__ import annotations

import math

from fleetkeeper_contract.tiers import TIERS, Tier

RETRY_MEMORY_S = 60.0
"""The same X-Request-Id within this time is a retry of a request that was counted."""
_MAX_REMEMBERED = 65_536
_ID_BYTES = 128
"""Only this many bytes of an identifier are compared."""


class Arrivals:
    """Distinct requests and, over finished 1 s bins, the sum of their counts' squares.

    The operator computes the mean and the variance of arrivals per second from the two, and so
    their burstiness.
    """

    def __init__(self) -> None:
        self.total = [0, 0, 0]
        self.squared = [0, 0, 0]
        self._bin = [0, 0, 0]
        self._bin_second = 0
        self._seen: dict[bytes, float] = {}

    def record(self, tier: Tier, request_id: bytes | None, now: float) -> bool:
        """Count a request unless it is a retry. Return whether it was counted."""
        if not self._bin_second <= now < self._bin_second + 1:
            self.close_bins(now)
        if request_id and not self._is_new(request_id, now):
            return False
        self.total[tier] += 1
        self._bin[tier] += 1
        return True

    def close_bins(self, now: float) -> None:
        """Add a finished bin to the sum of squares."""
        second = math.floor(now)
        if second == self._bin_second:
            return
        self._bin_second = second
        for tier in TIERS:
            self.squared[tier] += self._bin[tier] ** 2
            self._bin[tier] = 0

    def _is_new(self, request_id: bytes, now: float) -> bool:
        request_id = request_id[:_ID_BYTES]
        seen = self._seen
        while seen:
            oldest = next(iter(seen))
            if now - seen[oldest] < RETRY_MEMORY_S and len(seen) < _MAX_REMEMBERED:
                break
            del seen[oldest]
        if request_id in seen:
            return False
        seen[request_id] = now
        return True
