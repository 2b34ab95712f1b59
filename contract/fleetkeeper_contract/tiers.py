"""The tiers of requests, from the most to the least urgent."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Tier(IntEnum):
    """A tier. A smaller number is more urgent. The number is the tier's index in shared memory."""

    REALTIME = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Return the tier's name in headers, grants, keys, metrics and the status."""
        return self.name.lower()


TIERS: Final = tuple(Tier)
"""For loops on a request's path: iterating over the class itself costs several times as much."""
TIER_LABELS: Final = tuple(tier.label for tier in TIERS)
TIER_BY_LABEL: Final = {tier.label: tier for tier in TIERS}
