"""The accelerators that each service uses, as this process knows them, and may still request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fleetkeeper.api.names import engine_name
from fleetkeeper.autoscale.arbitrate import Allocation, Want
from fleetkeeper.common.budget import (
    UNBOUNDED,
    Allowance,
    Budget,
    Holding,
    ServiceKey,
    Usage,
    accelerators_of,
    tighter,
    with_reserved,
)
from fleetkeeper.reconcile.plan import Action, Apply
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache

NO_HOLDING: Final = Holding()


class GpuLedger:
    """The GPU budget over all services in the cache.

    Several reconciles may run at once. What one is about to write stays reserved until the next
    reconcile of its service, when the cache has the response. `_limits` are the allocations that a
    budget cut short: an accelerator that becomes free goes to the most urgent service, not to the
    first reconcile. So what wakes wait for (`_awaited`) is left to them by those that the tick has not
    seen growing.
    """

    def __init__(self, cache: Cache, budget: Budget) -> None:
        self.budget = budget
        self._cache = cache
        self._reserved: dict[Key, int] = {}
        self._limits: dict[Key, Allowance] = {}
        self._granted: dict[Key, int] = {}
        self._awaited: dict[Key, int] = {}
        self._usage: tuple[int, Usage] | None = None

    def holdings(self) -> dict[ServiceKey, Holding]:
        """Return what every service holds, including deleted services whose pods still terminate."""
        if not self.budget.is_bounded:
            return {}
        found = {(key.namespace, key.name): held for key, held in self._cache.gpu_holdings()}
        for key, gpus in self._reserved.items():
            address = (key.namespace, key.name)
            found[address] = with_reserved(found.get(address, NO_HOLDING), gpus)
        return found

    def allowance(self, key: Key) -> Allowance:
        """Return the most accelerators that the replicas of this service may request now."""
        if not self.budget.is_bounded:
            return UNBOUNDED
        version = self._cache.gpu_version
        if self._usage is None or self._usage[0] != version:
            self._usage = version, Usage(self.budget, self.holdings())
        left = self._usage[1].allowance((key.namespace, key.name))
        awaited = sum(gpus for of, gpus in self._awaited.items() if of != key)
        if awaited and left.gpus is not None:
            granted = min(left.gpus, self._granted.get(key, 0))
            left = replace(left, gpus=max(left.gpus - awaited, granted))
        return tighter(left, self._limits.get(key, UNBOUNDED))

    def reserve(self, key: Key, actions: Iterable[Action]) -> None:
        """Reserve what a write of the engine Deployment in `actions` requests; free it without one."""
        before = self._reserved.pop(key, None)
        for action in actions:
            is_engine = action.name == engine_name(key.name)
            if isinstance(action, Apply) and action.kind is Kind.DEPLOYMENT and is_engine:
                spec = action.manifest["spec"]
                self._reserved[key] = spec["replicas"] * accelerators_of(spec["template"]["spec"])
        if self._reserved.get(key) != before:
            self._usage = None

    def limit(self, key: Key, allocation: Allocation, want: Want) -> bool:
        """Limit the service to an allocation that a budget cut; return whether its limit changed."""
        before = self._limits.pop(key, None)
        self._awaited.pop(key, None)
        granted = allocation.replicas * want.gpus_per_replica
        self._granted[key] = 0 if want.goes_to_sleep else granted
        if allocation.limited_by:
            self._limits[key] = Allowance(granted, allocation.limited_by)
        if want.wakes and want.supplied == 0 < want.replicas:
            self._awaited[key] = want.gpus_per_replica
        return self._limits.get(key) != before

    def forget(self, key: Key) -> None:
        """Forget a deleted service. Its pods count as long as they are in the cache."""
        self.reserve(key, ())
        for by_key in (self._limits, self._granted, self._awaited):
            by_key.pop(key, None)
