"""The update strategy and the progress deadline of Deployments."""

from __future__ import annotations

from fleetkeeper.api.types import Rollout, RolloutStrategy
from fleetkeeper.api.values.int_or_percent import is_zero, number_of_pods
from fleetkeeper.common.values import Manifest


def progress_deadline_s(rollout: Rollout) -> int:
    """Return the progress deadline in seconds: a start, a drain, and ten minutes."""
    return rollout.startup_seconds + rollout.drain_seconds + 600


def rollout_pods(rollout: Rollout, desired: int) -> tuple[int, int]:
    """Return the pods above and below `desired` that a rollout may have, as a Deployment counts them.

    The surge rounds up, the unavailable pods round down. If both are 0, one pod may be unavailable.
    """
    surge = number_of_pods(rollout.max_surge, desired, round_up=True)
    unavailable = number_of_pods(rollout.max_unavailable, desired, round_up=False)
    return (surge, unavailable) if surge or unavailable else (0, 1)


def desired_strategy(rollout: Rollout, strategy: RolloutStrategy) -> Manifest:
    """Return the rolling update: Surge (and Auto) uses the spec's numbers, Replace and Swap no surge.

    Without surge, an old pod is removed before its replacement is created. A percentage stays one,
    so the Deployment is not written again when the number of replicas changes.
    """
    surge, unavailable = rollout.max_surge, rollout.max_unavailable
    if strategy in {RolloutStrategy.REPLACE, RolloutStrategy.SWAP}:
        surge, unavailable = 0, 1 if is_zero(unavailable) else unavailable
    elif is_zero(surge) and is_zero(unavailable):
        surge = 1
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }
