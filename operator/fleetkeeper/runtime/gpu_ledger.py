"""Which accelerators every service holds, as this process knows it, and what each may still create."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fleetkeeper.api.names import engine_name
from fleetkeeper.plan.budget import (
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
from fleetkeeper.plan.control.arbitrate import Order
from fleetkeeper.plan.model import Action, Apply, Kind
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.queue import Key

NO_HOLDING: Final = Holding()


class GpuLedger:
    """The GPU budget over all services of the cache.

    Two looks may be under way at once: what one is about to write is reserved until its next look,
    when the cache has the answer. `limits` are the orders that arbitration cut short, so that an
    accelerator that becomes free goes to the most urgent service and not to the first look.
    """

    def __init__(self, cache: Cache, budget: Budget) -> None:
        self.budget = budget
        self._cache = cache
        self._reserved: dict[Key, int] = {}
        self._limits: dict[Key, Allowance] = {}
        self._usage: tuple[int, Usage] | None = None

    def holdings(self) -> dict[ServiceKey, Holding]:
        """Return what every service holds, those included that are gone while their pods end."""
        if not self.budget.is_bounded:
            return {}
        found = {(key.namespace, key.name): held for key, held in self._cache.gpu_holdings()}
        for key, gpus in self._reserved.items():
            address = (key.namespace, key.name)
            found[address] = with_reserved(found.get(address, NO_HOLDING), gpus)
        return found

    def allowance(self, key: Key) -> Allowance:
        """Return the most accelerators that the replicas of this service may ask for now."""
        if not self.budget.is_bounded:
            return UNBOUNDED
        version = self._cache.gpu_version
        if self._usage is None or self._usage[0] != version:
            self._usage = version, Usage(self.budget, self.holdings())
        left = self._usage[1].allowance((key.namespace, key.name))
        return tighter(left, self._limits.get(key, UNBOUNDED))

    def reserve(self, key: Key, actions: Iterable[Action]) -> None:
        """Count what the write of the engine Deployment among `actions` asks for; none frees the last one."""
        before = self._reserved.pop(key, None)
        for action in actions:
            is_engine = action.name == engine_name(key.name)
            if isinstance(action, Apply) and action.kind is Kind.DEPLOYMENT and is_engine:
                spec = action.manifest["spec"]
                self._reserved[key] = spec["replicas"] * accelerators_of(spec["template"]["spec"])
        if self._reserved.get(key) != before:
            self._usage = None

    def limit(self, key: Key, order: Order, gpus_per_replica: int) -> bool:
        """Hold the service to an order that a budget cut short; return whether its limit changed."""
        before = self._limits.pop(key, None)
        if order.limited_by:
            self._limits[key] = Allowance(order.replicas * gpus_per_replica, order.limited_by)
        return self._limits.get(key) != before

    def forget(self, key: Key) -> None:
        """The service is gone; its pods count as long as the cache has them."""
        self.reserve(key, ())
        self._limits.pop(key, None)
