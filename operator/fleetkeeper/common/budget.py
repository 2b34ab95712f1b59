"""The GPU budget: how many accelerators are in use, and how many replicas may still be created.

The budget limits creation only: running replicas stay, even above a budget that was lowered. The
planner and the arbitration over all services use the same `Usage` and `bounded_replicas`, so
neither allows what the other refuses. Accelerators are counted in pod templates, not in the spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

ServiceKey = tuple[str, str]
"""Namespace and name of a service."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The accelerators that may be in use, in total and by namespace. None or absent: no bound.

    The key "*" applies to every namespace that is not listed.
    """

    total_gpus: int | None = None
    gpus_by_namespace: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_bounded(self) -> bool:
        """Return True if any bound is set."""
        return self.total_gpus is not None or bool(self.gpus_by_namespace)

    def of_namespace(self, namespace: str) -> int | None:
        """Return the bound of one namespace, None for no bound."""
        return self.gpus_by_namespace.get(namespace, self.gpus_by_namespace.get("*"))


@dataclass(frozen=True, slots=True)
class Holding:
    """The accelerators of one service.

    `claimed` belong to replicas that run or may be created at any time: the Deployment's replicas,
    or a larger number that is being written. `leaving` belong to pods beyond that number, which are
    terminating or being replaced by a rolling update. A new replica cannot use those yet.
    """

    claimed: int = 0
    leaving: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """The maximum number of accelerators for all replicas of one service. None: no bound.

    `by` names the budget, as the subject of "allows 2 of 5 replicas".
    """

    gpus: int | None = None
    by: str = ""


UNBOUNDED = Allowance()


class Usage:
    """The accelerators in use by all services while allowances are decided, within one call."""

    def __init__(self, budget: Budget, holdings: Mapping[ServiceKey, Holding]) -> None:
        self._budget = budget
        self._holdings = holdings
        self._claimed = {key: held.claimed for key, held in holdings.items()}
        self._by_namespace: Counter[str] = Counter()
        for (namespace, _), held in holdings.items():
            self._by_namespace[namespace] += held.claimed + held.leaving
        self._total = self._by_namespace.total()

    def allowance(self, key: ServiceKey) -> Allowance:
        """Return the accelerators that the budgets allow this service, its own claim included."""
        own, namespace = self._claimed.get(key, 0), key[0]
        found = UNBOUNDED
        total, of_namespace = self._budget.total_gpus, self._budget.of_namespace(namespace)
        if total is not None:
            found = Allowance(total - self._total + own, f"the fleet's budget of {total} GPUs")
        if of_namespace is not None:
            by = f"the budget of {of_namespace} GPUs for namespace {namespace}"
            left = Allowance(of_namespace - self._by_namespace[namespace] + own, by)
            found = tighter(found, left)
        return found

    def limiting_namespace(self, key: ServiceKey) -> str | None:
        """Return the namespace whose budget leaves this service the least; None if the fleet's does."""
        of_namespace = self._budget.of_namespace(key[0])
        if of_namespace is None:
            return None
        total, left = self._budget.total_gpus, of_namespace - self._by_namespace[key[0]]
        return key[0] if total is None or left <= total - self._total else None

    def leaving(self, namespace: str | None) -> int:
        """Return the accelerators of pods that are being removed, in a namespace or (None) in all."""
        return sum(
            held.leaving for (of, _), held in self._holdings.items() if namespace in (None, of)
        )

    def used_in(self, namespace: str) -> int:
        """Return the accelerators in use in a namespace, with those of pods that are being removed."""
        return self._by_namespace[namespace]

    def claim(self, key: ServiceKey, gpus: int) -> None:
        """Raise the claim of this service to `gpus` for all its replicas; never lower it."""
        more = max(0, gpus - self._claimed.get(key, 0))
        self._claimed[key] = self._claimed.get(key, 0) + more
        self._by_namespace[key[0]] += more
        self._total += more


def tighter(one: Allowance, other: Allowance) -> Allowance:
    """Return the allowance with fewer accelerators, the first one if they are equal."""
    if one.gpus is None or (other.gpus is not None and other.gpus < one.gpus):
        return other
    return one


def bounded_replicas(
    asked: int, kept: int, gpus_per_replica: int, allowance: Allowance
) -> tuple[int, str]:
    """Return how many of the `asked` replicas are allowed, and the limiting budget ("" for none).

    The number is never below `kept`, the replicas of the live Deployment, because their pods run.

    Worked example: 5 replicas are asked for, 1 is kept, a replica needs 2 accelerators and 7 are
    allowed. The result is 3.
    """
    if allowance.gpus is None or gpus_per_replica <= 0 or asked <= kept:
        return asked, ""
    fits = max(kept, min(asked, allowance.gpus // gpus_per_replica))
    return fits, allowance.by if fits < asked else ""


def exceeds(gpus: int, held: int, allowance: Allowance) -> bool:
    """Return True if `gpus` for all replicas exceed both the live Deployment's and the allowance.

    Without this check, a template with more accelerators per replica would bypass the budget.
    """
    return allowance.gpus is not None and gpus > max(held, allowance.gpus)


def with_reserved(held: Holding, gpus: int) -> Holding:
    """Return the holding with a claim of at least `gpus`."""
    return replace(held, claimed=max(held.claimed, gpus))


ACCELERATORS_VARIABLE = "FLEETKEEPER_ACCELERATORS"
"""The variable of an engine with the number of accelerators that its claims hold. Only the operator
can set it, and it cannot be changed in a pod."""
OTHER_DEVICES_VARIABLE = "FLEETKEEPER_OTHER_DEVICES"
"""The variable of an engine with the extended resources that are no accelerators, by name."""


def accelerators_of(pod_spec: Mapping[str, Any]) -> int:
    """Return the accelerators that one pod of this spec requests, 0 if no readable amount is found.

    Accelerators are extended resources, which Kubernetes counts in whole units and reads from
    limits, or those of claims, whose number `ACCELERATORS_VARIABLE` holds. Resources that
    `OTHER_DEVICES_VARIABLE` names do not count. Among several kinds the largest number counts: a
    webhook may add network devices to the GPUs.
    """
    count = 0
    containers = pod_spec.get("containers")
    others = _other_devices(containers)
    for container in containers if isinstance(containers, list) else ():
        if pod_spec.get("resourceClaims"):
            count = max(count, _claimed(container))
        resources = container.get("resources") if isinstance(container, Mapping) else None
        limits = resources.get("limits") if isinstance(resources, Mapping) else None
        for name, amount in limits.items() if isinstance(limits, Mapping) else ():
            if "/" in name and not name.startswith("kubernetes.io/") and name not in others:
                count = max(count, _pieces(amount))
    return count


def _other_devices(containers: object) -> frozenset[str]:
    return frozenset(
        name
        for container in (containers if isinstance(containers, list) else ())
        for name in str(_variable(container, OTHER_DEVICES_VARIABLE)).split()
    )


def _claimed(container: object) -> int:
    return _pieces(_variable(container, ACCELERATORS_VARIABLE))


def _variable(container: object, name: str) -> object:
    """Return the value of a container's variable, "" if it has none."""
    variables = container.get("env") if isinstance(container, Mapping) else None
    for variable in variables if isinstance(variables, list) else ():
        if isinstance(variable, Mapping) and variable.get("name") == name:
            return variable.get("value", "")
    return ""


def _pieces(amount: object) -> int:
    """Return the whole number that the API server wrote, 0 for any other text.

    The API server writes larger numbers with a unit; Fleetkeeper never requests so many.
    """
    text = str(amount)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
