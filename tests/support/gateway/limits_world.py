"""Limiters of the gateway against a real Redis, and what tests ask of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from prometheus_client import CollectorRegistry

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.interfaces import (
    Admission,
    Demand,
    Key,
    Limiter,
    LimitRefused,
    RequestLimiter,
    TierLimits,
)
from fleetkeeper_gateway.limits import LimitSettings, Timing, create_limiter
from tests.support.guards import GUARD_S

PATIENT = Timing(budget_s=GUARD_S, settle_budget_s=GUARD_S, retry_s=0.05)
"""Redis answers, however busy the machine is."""
BRIEF = replace(PATIENT, budget_s=Timing().budget_s)
"""The budget of a real gateway, for a server that does not answer."""

T = TypeVar("T")
_numbers = itertools.count(1)


def key_with(
    requests: int | None = None,
    tokens: int | None = None,
    concurrency: int | None = None,
    *,
    key_id: str = "team-a",
) -> Key:
    """Return a key with these limits in the tier `standard`."""
    limits = TierLimits(requests, tokens, concurrency)
    return Key(key_id, f"{key_id} of tests", None, limits={Tier.STANDARD: limits})


def demand_of(key: Key, tokens: int = 1, tier: Tier = Tier.STANDARD) -> Demand:
    """Return a new request's demand."""
    return Demand(key, tier, f"request-{next(_numbers)}", tokens)


async def refused(limiter: Limiter, demand: Demand) -> LimitRefused:
    """Return how a request is refused."""
    try:
        admission = await limiter.admit(demand)
    except LimitRefused as error:
        return error
    raise AssertionError(f"admitted: {admission.headers}")


async def admitted(limiter: Limiter, key: Key, count: int, tokens: int = 1) -> list[Admission]:
    """Admit several requests."""
    return [await limiter.admit(demand_of(key, tokens)) for _ in range(count)]


async def first_refusal(limiter: Limiter, key: Key) -> LimitRefused:
    """Admit requests until one is refused, and return how it is."""
    while True:
        try:
            await limiter.admit(demand_of(key))
        except LimitRefused as error:
            return error


async def until_admitted(limiter: Limiter, key: Key, tokens: int = 1) -> Admission:
    """Try until a request is admitted."""
    async with asyncio.timeout(GUARD_S):
        while True:
            try:
                return await limiter.admit(demand_of(key, tokens))
            except LimitRefused:
                await asyncio.sleep(0.05)


async def until(ask: Callable[[], T], what: str) -> T:
    """Wait until something is true, and return it."""
    end = asyncio.get_running_loop().time() + GUARD_S
    while not (found := ask()):
        assert asyncio.get_running_loop().time() < end, f"never true: {what}"
        await asyncio.sleep(0.01)
    return found


@dataclass
class Replica:
    """A limiter as one replica of the gateway has it, with its metrics."""

    limiter: RequestLimiter
    registry: CollectorRegistry

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        found = self.registry.get_sample_value(f"fleetkeeper_gateway_limits_{name}", labels)
        assert found is not None, name
        return found

    @property
    def shares(self) -> bool:
        """Return whether its limits are shared."""
        return self.value("shared") == 1

    async def until_shared(self) -> None:
        """Wait until it reaches Redis."""
        await until(lambda: self.shares, "limits are shared")

    async def until_local(self) -> None:
        """Wait until it has given Redis up."""
        await until(lambda: not self.shares, "limits are local")


@dataclass
class Replicas:
    """Starts limiters, and closes them at the end."""

    all: list[Replica] = field(default_factory=list)

    def start(self, settings: LimitSettings, timing: Timing = PATIENT) -> Replica:
        """Start one."""
        registry = CollectorRegistry()
        replica = Replica(create_limiter(settings, registry=registry, timing=timing), registry)
        self.all.append(replica)
        return replica

    async def shared(self, url: str, timing: Timing = PATIENT) -> Replica:
        """Start one that reaches Redis."""
        replica = self.start(LimitSettings(redis_url=url), timing)
        await replica.until_shared()
        return replica
