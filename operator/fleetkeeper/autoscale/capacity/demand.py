"""The arrival rate to plan for, and the replicas that carry it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import DEMAND_TICKS, MAX_REPLICAS_NEEDED, RATE_S, SIGMAS


@dataclass(frozen=True, slots=True)
class Demand:
    """The planned arrivals per second."""

    per_s: float = 0.0
    seen: int = 0
    """Number of ticks used."""


def smoothed(demand: Demand, arrivals_per_s: float) -> Demand:
    """Return the demand after one more tick.

    Within half a minute, N Poisson arrivals vary by sqrt(N). A rate within two such deviations of the
    mean moves it by 1/60 a tick (five minutes); a rate beyond moves it at once, up to two deviations from
    the rate.

    Example: a mean of 4/s; 5/s are 150 in 30 s, 24.5 more or fewer are chance, so 4.18/s are certain and
    become the mean.
    """
    if demand.seen == 0:
        return Demand(arrivals_per_s, 1)
    weight = 1.0 / min(DEMAND_TICKS, demand.seen + 1)
    mean = demand.per_s + weight * (arrivals_per_s - demand.per_s)
    chance = SIGMAS * math.sqrt(arrivals_per_s / RATE_S)
    mean = min(max(mean, arrivals_per_s - chance), arrivals_per_s + chance)
    return Demand(mean, demand.seen + 1)


def needed_replicas(arrivals_per_s: float, carried_per_s: float) -> int:
    """Return the arrivals divided by what a replica carries, rounded up; 0 if it is not known what it carries.

    Example: 20 requests/s, and 8 carried by a replica: 20 / 8 = 2.5, so 3 replicas.
    """
    if carried_per_s <= 0:
        return 0
    return math.ceil(min(arrivals_per_s / carried_per_s, MAX_REPLICAS_NEEDED))
