"""Request tiers, from the most to the least urgent."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """A tier. A smaller number is more urgent."""

    REALTIME = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Return the tier's name in headers, grants and metrics."""
        return self.name.lower()


TIERS = {tier.label: tier for tier in Tier}


def default_tier(highest: Tier) -> Tier:
    """Return the tier of a request that names none: standard, or the key's highest if that is less."""
    return max(Tier.STANDARD, highest)
