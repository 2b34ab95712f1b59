"""Wants, then orders: one pure function over all services shares scarce accelerators.

Realtime before standard before batch, then the largest breach of an objective; minimums before
growth. What runs is not taken away for another service. What anybody asks to be created, also by
spec.replicas or minReplicas, has to fit in the budget (plan/budget.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fleetkeeper.plan.budget import Budget, Holding, ServiceKey, Usage, bounded_replicas
from fleetkeeper.plan.control.samples import TIERS, Tier

NO_HOLDINGS: Mapping[ServiceKey, Holding] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Want:
    """What one service asks for. `breach`: its worst signal over its objective (1 = at the objective).

    `tier`: the most urgent tier with traffic. `supplied`: replicas that run or are on their way.
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
        """Namespace and name."""
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Order:
    """What one service gets. `limited_by` says which budget kept it below its want, else empty."""

    replicas: int
    limited_by: str = ""


def arbitrate(
    wants: Iterable[Want], budget: Budget, holdings: Mapping[ServiceKey, Holding] = NO_HOLDINGS
) -> dict[ServiceKey, Order]:
    """Orders by (namespace, name). Same arguments, same orders, in whatever sequence the wants come.

    `holdings` are the accelerators of all services, also of those that state no want: one that is
    being deleted, cannot be read or could not be decided on keeps its share.

    Example: 4 accelerators, two services with one replica each; realtime wants 3, batch wants 4:
    realtime gets 3, batch keeps 1 and is told which budget limits it.
    """
    asked = sorted(wants, key=lambda want: want.key)
    usage = Usage(budget, {**{want.key: _supplied(want) for want in asked}, **holdings})
    granted = {want.key: Order(min(want.replicas, want.supplied)) for want in asked}
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


def _grant(want: Want, up_to: int, granted: dict[ServiceKey, Order], usage: Usage) -> None:
    kept = granted[want.key].replicas
    if up_to <= kept:
        return
    allowance = usage.allowance(want.key)
    replicas, by = bounded_replicas(up_to, kept, want.gpus_per_replica, allowance)
    usage.claim(want.key, replicas * want.gpus_per_replica)
    granted[want.key] = Order(replicas, by)
