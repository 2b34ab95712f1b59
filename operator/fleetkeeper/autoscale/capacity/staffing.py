"""Replicas that a load needs, from what one replica carries within the objectives.

n = ceil(arrivals / carried)        arrivals: the demand; carried: of one replica, both requests/s

`carried` is `Targets.carried_per_s` if the step-time model is known.
"""

from __future__ import annotations

import math

from fleetkeeper.autoscale.constants import MAX_REPLICAS_NEEDED


def needed_replicas(arrivals_per_s: float, carried_per_s: float) -> int:
    """Return n of the formula above; 0 if it is not known what a replica carries.

    Example: 20 requests/s, and 8 carried by a replica: 20 / 8 = 2.5, so 3 replicas.
    """
    if carried_per_s <= 0:
        return 0
    return math.ceil(min(arrivals_per_s / carried_per_s, MAX_REPLICAS_NEEDED))
