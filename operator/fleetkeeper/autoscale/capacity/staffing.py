"""Replicas that a load needs, from what one replica carries within the objectives.

B + k sqrt(z B) <= C        B: mean sequences in a replica, C: its capacity, z: peakedness
carried = B / S(B)          requests/s at the largest such B; S(B): time of a request in that batch
n = ceil(arrivals / carried - 0.1)
+ backlog / (60 s x carried)        if queue wait is above a quarter of its objective

k: the quantile of the normal distribution at the objective's attainment (95%: 1.64). So the batch
exceeds the capacity in one moment of twenty, and a higher `attainmentPercent` costs replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from fleetkeeper.autoscale.constants import (
    BACKLOG_S,
    BACKLOG_WAIT_RATIO,
    BURSTINESS,
    ROUNDING,
    SERVICE_CV2,
)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a service. `carried_per_s`: requests/s of one replica. `backlog`: waiting requests."""

    arrivals_per_s: float
    carried_per_s: float
    backlog: float = 0.0


def peakedness(burstiness: float) -> float:
    """Return z of the formula, (IDC + Cs^2) / 2, within 1 and 10.

    IDC: index of dispersion of arrivals. Cs: coefficient of variation of the service time.
    """
    low, high = BURSTINESS
    return min(high, max(low, (burstiness + SERVICE_CV2) / 2))


def mean_sequences(capacity: float, attainment_ratio: float, z: float) -> float:
    """Return B of the formula: the mean of a batch that stays within `capacity` for that share of time.

    Example: capacity 100, 95% and z = 1: 84.9, because 84.9 + 1.645 sqrt(84.9) = 100.
    """
    spread = NormalDist().inv_cdf(attainment_ratio) * math.sqrt(z)
    root = (math.sqrt(spread * spread + 4.0 * max(0.0, capacity)) - spread) / 2.0
    return root * root


def needed_replicas(load: Load) -> int:
    """Return n of the formula above.

    Example: 20 requests/s, and 8 carried by a replica: 20 / 8 - 0.1 = 2.4, so 3 replicas.
    """
    if load.carried_per_s <= 0:
        return 0
    needed = load.arrivals_per_s / load.carried_per_s
    needed += load.backlog / (BACKLOG_S * load.carried_per_s)
    return max(0, math.ceil(min(needed, 1e6) - ROUNDING))


def backlog_counts(queue_wait_s: float, objective_s: float) -> bool:
    """Return whether waiting requests count as backlog: above a quarter of the objective."""
    return queue_wait_s > BACKLOG_WAIT_RATIO * objective_s
