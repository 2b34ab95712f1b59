"""How a Deployment replaces its pods, and how long that may take."""

from __future__ import annotations

from fleetkeeper.api.types import Rollout, RolloutStrategy
from fleetkeeper.plan.model import Manifest


def progress_deadline_s(rollout: Rollout) -> int:
    """Seconds after which Kubernetes calls a roll-out stuck: a start, a drain, and ten minutes."""
    return rollout.startup_seconds + rollout.drain_seconds + 600


def desired_strategy(rollout: Rollout, strategy: RolloutStrategy) -> Manifest:
    """Surge (and Auto): the new pod first, as the spec's numbers say. Replace: the old one goes first."""
    surge, unavailable = rollout.max_surge, rollout.max_unavailable
    if strategy is RolloutStrategy.REPLACE:
        surge, unavailable = 0, max(1, unavailable)
    elif surge == 0 and unavailable == 0:
        surge = 1
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }
