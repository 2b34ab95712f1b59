"""The GPU budget: how many accelerators are in use, and how many replicas may still be created.

Bounds creation only. What runs stays, even above a budget that was lowered. The planner and the
arbitration over all services ask the same `Usage` and the same `bounded_replicas`, so that neither
can allow what the other would refuse. Accelerators are those that pod templates ask for, not those
that a spec mentions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

ServiceKey = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Accelerators that may be in use, in all and by namespace. None or absent: no bound.

    "*" stands for every namespace that is not named.
    """

    total_gpus: int | None = None
    gpus_by_namespace: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_bounded(self) -> bool:
        """Whether there is any bound."""
        return self.total_gpus is not None or bool(self.gpus_by_namespace)

    def of_namespace(self, namespace: str) -> int | None:
        """Return the bound of one namespace."""
        return self.gpus_by_namespace.get(namespace, self.gpus_by_namespace.get("*"))


@dataclass(frozen=True, slots=True)
class Holding:
    """The accelerators of one service.

    `claimed` belong to replicas that run or may be created at any time: the Deployment's number, or
    a larger one that is being written. `leaving` belong to pods beyond that number: they end, or a
    rolling update replaces them. A new replica cannot have those yet.
    """

    claimed: int = 0
    leaving: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most accelerators that all replicas of one service may ask for. None: no bound.

    `by` names the budget, as the subject of "allows 2 of 5 replicas".
    """

    gpus: int | None = None
    by: str = ""


UNBOUNDED = Allowance()


class Usage:
    """The accelerators in use by all services, while allowances are decided; lives inside one call."""

    def __init__(self, budget: Budget, holdings: Mapping[ServiceKey, Holding]) -> None:
        self._budget = budget
        self._claimed = {key: held.claimed for key, held in holdings.items()}
        self._by_namespace: Counter[str] = Counter()
        for (namespace, _), held in holdings.items():
            self._by_namespace[namespace] += held.claimed + held.leaving
        self._total = self._by_namespace.total()

    def allowance(self, key: ServiceKey) -> Allowance:
        """Return what the budgets leave to this service, what it has already claimed included."""
        own, namespace = self._claimed.get(key, 0), key[0]
        found = UNBOUNDED
        total, of_namespace = self._budget.total_gpus, self._budget.of_namespace(namespace)
        if total is not None:
            found = Allowance(total - self._total + own, f"the fleet's budget of {total} GPUs")
        if of_namespace is not None:
            by = f"the budget of {of_namespace} GPUs of namespace {namespace}"
            left = Allowance(of_namespace - self._by_namespace[namespace] + own, by)
            found = tighter(found, left)
        return found

    def claim(self, key: ServiceKey, gpus: int) -> None:
        """Count `gpus` for all replicas of this service, where it has claimed fewer until now."""
        more = max(0, gpus - self._claimed.get(key, 0))
        self._claimed[key] = self._claimed.get(key, 0) + more
        self._by_namespace[key[0]] += more
        self._total += more


def tighter(one: Allowance, other: Allowance) -> Allowance:
    """Return the allowance with fewer accelerators, the first where they are equal."""
    if one.gpus is None or (other.gpus is not None and other.gpus < one.gpus):
        return other
    return one


def bounded_replicas(
    asked: int, kept: int, gpus_per_replica: int, allowance: Allowance
) -> tuple[int, str]:
    """Return how many of the `asked` replicas are allowed, and by whom there are fewer, else "".

    Never fewer than `kept`, the number of the live Deployment: its pods run.

    Example: 5 are asked for, 1 is kept, a replica needs 2 accelerators and 7 are allowed: 3.
    """
    if allowance.gpus is None or gpus_per_replica <= 0 or asked <= kept:
        return asked, ""
    fits = max(kept, min(asked, allowance.gpus // gpus_per_replica))
    return fits, allowance.by if fits < asked else ""


def exceeds(gpus: int, held: int, allowance: Allowance) -> bool:
    """Return whether `gpus` for all replicas are more than the live Deployment's and than allowed.

    So a template that asks for more accelerators a replica cannot go around the budget.
    """
    return allowance.gpus is not None and gpus > max(held, allowance.gpus)


def with_reserved(held: Holding, gpus: int) -> Holding:
    """Return the holding with a claim of at least `gpus`."""
    return replace(held, claimed=max(held.claimed, gpus))


def accelerators_of(pod_spec: Mapping[str, Any]) -> int:
    """Return the accelerators that one pod of this spec asks for, 0 where nothing readable is asked.

    Accelerators are extended resources, which Kubernetes counts in whole pieces and takes as limits.
    Of several kinds the largest number counts: a webhook may add network devices beside the GPUs.
    """
    count = 0
    containers = pod_spec.get("containers")
    for container in containers if isinstance(containers, list) else ():
        resources = container.get("resources") if isinstance(container, Mapping) else None
        limits = resources.get("limits") if isinstance(resources, Mapping) else None
        for name, amount in limits.items() if isinstance(limits, Mapping) else ():
            if "/" in name and not name.startswith("kubernetes.io/"):
                count = max(count, _pieces(amount))
    return count


def _pieces(amount: object) -> int:
    """Return a whole number as the API server writes it; larger ones carry a unit, which we never ask."""
    text = str(amount)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
