"""Arbitration: turn the recommendations of all services into allocations within the GPU budget.

Order: realtime before standard before batch, then the largest breach of an objective; minimums before
growth. A running replica is not removed for another service. Every new replica, including those from
spec.replicas or minReplicas, must fit in the budget (plan/budget.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fleetkeeper.autoscale.signals.samples import TIERS, Tier
from fleetkeeper.common.budget import Budget, Holding, ServiceKey, Usage, bounded_replicas

NO_HOLDINGS: Mapping[ServiceKey, Holding] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Want:
    """The recommendation of one service.

    `breach`: its worst signal over its objective (1: at the objective). `tier`: the most urgent tier
    with traffic. `supplied`: replicas that run or are starting.
    """

    namespace: str
    name: str
    replicas: int
    supplied: int
    min_replicas: int = 1
    gpus_per_replica: int = 1
    tier: Tier = Tier.STANDARD
    breach: float = 0.0
    reason: str = ""

    @property
    def key(self) -> ServiceKey:
        """The namespace and name."""
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of one service. `limited_by`: the budget that reduced it, else empty."""

    replicas: int
    limited_by: str = ""


def arbitrate(
    wants: Iterable[Want], budget: Budget, holdings: Mapping[ServiceKey, Holding] = NO_HOLDINGS
) -> dict[ServiceKey, Allocation]:
    """Return the allocations by (namespace, name). The result does not depend on the order of `wants`.

    `holdings`: the accelerators of all services, including those without a recommendation. A service
    that is being deleted, cannot be read or could not be decided keeps its share.

    Example: 4 accelerators and two services with one replica each; 3 are recommended for realtime and 4
    for batch: realtime gets 3, batch keeps 1 and its allocation names the budget.
    """
    asked = sorted(wants, key=lambda want: want.key)
    usage = Usage(budget, {**{want.key: _supplied(want) for want in asked}, **holdings})
    granted = {want.key: Allocation(min(want.replicas, want.supplied)) for want in asked}
    growing = sorted((w for w in asked if w.replicas > granted[w.key].replicas), key=_urgency)
    for want in growing:
        _grant(want, min(want.min_replicas, want.replicas), granted, usage)
    for want in growing:
        _grant(want, want.replicas, granted, usage)
    return granted


def _supplied(want: Want) -> Holding:
    return Holding(want.supplied * want.gpus_per_replica)


def _urgency(want: Want) -> tuple[int, float, ServiceKey]:
    return TIERS.index(want.tier), -want.breach, want.key


def _grant(want: Want, up_to: int, granted: dict[ServiceKey, Allocation], usage: Usage) -> None:
    kept = granted[want.key].replicas
    if up_to <= kept:
        return
    allowance = usage.allowance(want.key)
    replicas, by = bounded_replicas(up_to, kept, want.gpus_per_replica, allowance)
    usage.claim(want.key, replicas * want.gpus_per_replica)
    granted[want.key] = Allocation(replicas, by)
