"""The update strategy and the progress deadline of Deployments."""

from __future__ import annotations

from fleetkeeper.api.types import Rollout, RolloutStrategy
from fleetkeeper.common.values import Manifest


def progress_deadline_s(rollout: Rollout) -> int:
    """Return the progress deadline in seconds: a start, a drain, and ten minutes."""
    return rollout.startup_seconds + rollout.drain_seconds + 600


def desired_strategy(rollout: Rollout, strategy: RolloutStrategy) -> Manifest:
    """Return the rolling update: Surge (and Auto) uses the spec's numbers, Replace no surge.

    With Replace, an old pod is removed before its replacement is created.
    """
    surge, unavailable = rollout.max_surge, rollout.max_unavailable
    if strategy is RolloutStrategy.REPLACE:
        surge, unavailable = 0, max(1, unavailable)
    elif surge == 0 and unavailable == 0:
        surge = 1
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }
