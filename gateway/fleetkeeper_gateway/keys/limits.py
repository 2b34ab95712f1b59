"""Limits by tier, from the three limits of a key's Secret or of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetkeeper_contract.tiers import TIER_BY_LABEL, Tier
from fleetkeeper_gateway.interfaces import TierLimits

Limit = Iterable[tuple[str, int]]
"""Numbers by the name of their tier."""


def limits_by_tier(requests: Limit, tokens: Limit, concurrency: Limit) -> Mapping[Tier, TierLimits]:
    """Return the limits by tier, without tiers that have none."""
    per_tier = dict(requests), dict(tokens), dict(concurrency)
    return {
        tier: TierLimits(*(limits.get(name) for limits in per_tier))
        for name, tier in TIER_BY_LABEL.items()
        if any(name in limits for limits in per_tier)
    }
