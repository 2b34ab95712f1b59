"""Replicas that a load needs: square-root staffing with measured burstiness.

a = arrivals * S(C*)                     sequences in service at the same time
n = ceil(max(a / rho, a + beta sqrt(a z)) / C - 0.1)
+ backlog / (60 s x completions per second of a pod)   if W is above a quarter of its objective

S(C*): time in service at capacity C. z: peakedness. W: queue wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import (
    BACKLOG_S,
    BACKLOG_WAIT_RATIO,
    BETA_REALTIME,
    BETA_STANDARD,
    BURSTINESS,
    RHO_BATCH,
    RHO_REALTIME,
    RHO_STANDARD,
    ROUNDING,
    SERVICE_CV2,
)
from fleetkeeper.autoscale.signals.samples import Counters


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a service. `capacity`: sequences of a replica; `service_s`: time of a request there.

    `rho`, `beta`: headroom for the mix of tiers. `backlog`: waiting requests to work off.
    `completions_per_s`: completions of one pod at its capacity.
    """

    arrivals_per_s: float
    service_s: float
    capacity: float
    rho: float
    beta: float
    burstiness: float
    backlog: float = 0.0
    completions_per_s: float = 0.0


def headroom(rates: Counters) -> tuple[float, float]:
    """Return rho and beta, weighted by each tier's share of arrivals; without arrivals those of standard.

    Example: realtime only 0.75 and 1.5; batch only 0.95 and 0; half realtime, half batch 0.85 and 0.75.
    """
    realtime, standard, batch = (
        rates.arrivals_realtime,
        rates.arrivals_standard,
        rates.arrivals_batch,
    )
    total = realtime + standard + batch
    if total <= 0:
        return RHO_STANDARD, BETA_STANDARD
    rho = (realtime * RHO_REALTIME + standard * RHO_STANDARD + batch * RHO_BATCH) / total
    beta = (realtime * BETA_REALTIME + standard * BETA_STANDARD) / total
    return rho, beta


def peakedness(burstiness: float) -> float:
    """Return z of the formula, (IDC + Cs^2) / 2, within 1 and 10.

    IDC: index of dispersion of arrivals. Cs: coefficient of variation of the service time.
    """
    low, high = BURSTINESS
    return min(high, max(low, (burstiness + SERVICE_CV2) / 2))


def needed_replicas(load: Load) -> int:
    """Return n of the formula above; only the larger of the two headrooms applies.

    Example: 4 requests/s of 20 s each are 80 sequences; at rho 0.85 that is 94.1, at beta 0.75 and
    z = 1 it is 86.7: 94.1 / 32 - 0.1 = 2.84, so 3 replicas of capacity 32. Without load it is 0.
    """
    offered = load.arrivals_per_s * load.service_s
    spread = load.beta * math.sqrt(offered * peakedness(load.burstiness))
    needed = max(offered / load.rho, offered + spread) / max(load.capacity, 1.0)
    if load.backlog > 0 and load.completions_per_s > 0:
        needed += load.backlog / (BACKLOG_S * load.completions_per_s)
    return max(0, math.ceil(min(needed, 1e6) - ROUNDING))


def backlog_counts(queue_wait_s: float, objective_s: float) -> bool:
    """Return whether waiting requests count as backlog: above a quarter of the objective."""
    return queue_wait_s > BACKLOG_WAIT_RATIO * objective_s
