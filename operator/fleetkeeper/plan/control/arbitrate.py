"""Wants, then orders: one pure function over all services shares scarce accelerators.

Realtime before standard before batch, then the largest breach of an objective. What runs is not
taken away for another service, nothing goes below its minReplicas, and a number set by a person
(spec.replicas) is counted, not limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fleetkeeper.plan.control.samples import TIERS, Tier


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
    pinned: bool = False
    reason: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Budget:
    """Accelerators that may be used in all and by namespace; None or absent: no bound."""

    total_gpus: int | None = None
    gpus_by_namespace: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Order:
    """What one service gets. `limited_by` says which budget kept it below its want, else empty."""

    replicas: int
    limited_by: str = ""


@dataclass
class _Left:
    """Accelerators left while orders are made; lives inside one call."""

    total: int | None
    by_namespace: dict[str, int]

    def most(self, missing: int, namespace: str, gpus: int) -> tuple[int, str]:
        """How many of `missing` replicas still fit, and which budget says so."""
        fits, by = missing, ""
        if gpus <= 0:
            return fits, by
        if self.total is not None and self.total // gpus < fits:
            fits, by = max(0, self.total // gpus), "the fleet's budget of accelerators"
        own = self.by_namespace.get(namespace)
        if own is not None and own // gpus < fits:
            fits, by = max(0, own // gpus), f"the budget of accelerators of namespace {namespace}"
        return fits, by

    def take(self, namespace: str, gpus: int) -> None:
        if self.total is not None:
            self.total -= gpus
        if namespace in self.by_namespace:
            self.by_namespace[namespace] -= gpus


def _kept(want: Want) -> int:
    """What a service has without asking: a pin, or what runs and is still wanted."""
    return want.replicas if want.pinned else min(want.replicas, want.supplied)


def arbitrate(wants: Iterable[Want], budget: Budget) -> dict[tuple[str, str], Order]:
    """Orders by (namespace, name). Same wants and budget, same orders, in whatever sequence they come.

    Example: 4 accelerators, two services with one replica each; realtime wants 3, batch wants 4:
    realtime gets 3, batch keeps 1 and is told which budget limits it.
    """
    asked = sorted(wants, key=lambda want: want.key)
    left = _Left(budget.total_gpus, dict(budget.gpus_by_namespace))
    granted: dict[tuple[str, str], Order] = {}
    for want in asked:
        kept = _kept(want)
        granted[want.key] = Order(kept)
        left.take(want.namespace, kept * want.gpus_per_replica)
    growing = [want for want in asked if want.replicas > granted[want.key].replicas]
    below = [want for want in growing if granted[want.key].replicas < want.min_replicas]
    for want in sorted(below, key=_urgency):
        granted[want.key] = _grant(
            want, granted[want.key], min(want.min_replicas, want.replicas), left
        )
    for want in sorted(growing, key=_urgency):
        granted[want.key] = _grant(want, granted[want.key], want.replicas, left)
    return granted


def _urgency(want: Want) -> tuple[int, float, tuple[str, str]]:
    return TIERS.index(want.tier), -want.breach, want.key


def _grant(want: Want, order: Order, up_to: int, left: _Left) -> Order:
    missing = up_to - order.replicas
    if missing <= 0:
        return order
    given, by = left.most(missing, want.namespace, want.gpus_per_replica)
    left.take(want.namespace, given * want.gpus_per_replica)
    return Order(order.replicas + given, by)
