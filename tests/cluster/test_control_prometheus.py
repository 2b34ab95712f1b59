"""The control loop in a real operator process: a real API server, a real Prometheus, its faults, kills."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest_asyncio

from control_world import LoopbackEngines, loopback_engines
from fleetkeeper_local.controlplane import ControlPlane
from operator_world import OperatorProcess, World, condition, operator_world, service

CALM_PER_S = 4.0
BUSY_PER_S = 40.0
SHOWN_S = 30.0
"""A lost Prometheus must be seen in the status within this; waits are twice as long."""
BACK_S = 10.0
"""Two scrapes of a second each, and what a busy machine adds."""
KILLS = 3


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-control") as found:
        yield found


@pytest_asyncio.fixture
async def engines(control_plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    async with loopback_engines(control_plane, world) as found:
        yield found


def spec(engines: LoopbackEngines, mode: str) -> dict[str, Any]:
    """Two to six replicas of eight sequences each."""
    return {
        "placement": engines.placement,
        "scaling": {
            "mode": mode,
            "minReplicas": 2,
            "maxReplicas": 6,
            "scaleDownDelaySeconds": 60,
        },
        "batching": {
            "mode": "Advisory" if mode == "Advisory" else "Auto",
            "minSequences": 8,
            "maxSequences": 8,
        },
        "breaker": {"mode": "Disabled" if mode == "Advisory" else "Auto"},
        "objectives": {"queueWaitMilliseconds": 500, "batchTimeMilliseconds": 50},
    }


class Fleet:
    """What a test looks at."""

    def __init__(self, world: World, engines: LoopbackEngines) -> None:
        self.world = world
        self.engines = engines
        self.operator: OperatorProcess = world.operator(env=engines.settings())
        self.seen: dict[str, list[int]] = {"chat": [], "told": []}

    def replicas(self, name: str = "chat") -> int:
        """What the Deployment orders."""
        live = self.world.get("Deployment", name)
        return int(live["spec"]["replicas"]) if live is not None else 0

    def status(self, name: str = "chat") -> dict[str, Any]:
        """The service's status."""
        return dict((self.world.fis(name) or {}).get("status") or {})

    def is_measured(self, name: str) -> bool:
        """Whether fresh samples of it have come."""
        return condition(self.world.fis(name), "MetricsAvailable").get("status") == "True"

    async def watch(self) -> None:
        """Notes every number of replicas that is ever ordered."""
        while True:
            for name, seen in self.seen.items():
                replicas = self.replicas(name)
                if replicas and (not seen or seen[-1] != replicas):
                    seen.append(replicas)
            await asyncio.sleep(0.02)

    def assert_never_lowered(self) -> None:
        """No number of replicas was ever below the one before."""
        for name, seen in self.seen.items():
            assert all(before <= after for before, after in pairwise(seen)), (name, seen)


@pytest_asyncio.fixture
async def fleet(world: World, engines: LoopbackEngines) -> AsyncIterator[Fleet]:
    """A fleet whose replicas are noted from its first to its last."""
    found = Fleet(world, engines)
    watching = asyncio.create_task(found.watch())
    yield found
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_load_raises_replicas_and_no_fault_or_kill_lowers_them(fleet: Fleet) -> None:
    """From a calm fleet through load, every kind of a lost Prometheus, and kills of the operator."""
    await a_calm_fleet_is_measured(fleet)
    await load_raises_replicas_where_it_may(fleet)
    await each_loss_is_shown_and_ends(fleet)
    await kills_lower_nothing(fleet)
    orders_rise_over_leaders(fleet)
    fleet.assert_never_lowered()


async def a_calm_fleet_is_measured(fleet: Fleet) -> None:
    """Both services get two replicas; a minute later their samples count."""
    fleet.engines.rate_per_s = {"chat": CALM_PER_S, "told": CALM_PER_S}
    await fleet.operator.start().leads()
    await fleet.world.create(service("chat", **spec(fleet.engines, "Auto")))
    await fleet.world.create(service("told", **spec(fleet.engines, "Advisory")))
    await fleet.world.ready("chat", "told")
    for name in ("chat", "told"):
        await fleet.world.until(f"{name} measured", partial(fleet.is_measured, name), timeout_s=150)
        assert fleet.status(name)["breaker"]["source"] == "Closed"
    assert fleet.replicas("chat") == fleet.replicas("told") == 2


async def load_raises_replicas_where_it_may(fleet: Fleet) -> None:
    """Ten times the load: Auto orders replicas and says why; Advisory says what it would order."""
    fleet.engines.rate_per_s = {"chat": BUSY_PER_S, "told": BUSY_PER_S}
    await fleet.world.until("replicas raised", lambda: fleet.replicas() > 2)
    await fleet.world.until("a decision told", lambda: _raises(fleet))
    await fleet.world.until(
        "the wish told", lambda: fleet.status("told")["scaling"].get("wanted", 0) > 2
    )
    assert fleet.replicas("told") == 2
    limited = condition(fleet.world.fis("told"), "ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "Advisory")
    await fleet.world.ready("chat")
    messages = [event["message"] for event in await fleet.world.events_of()]
    assert [text for text in messages if text.startswith("Replicas 2 -> ")], messages


def _raises(fleet: Fleet) -> list[dict[str, Any]]:
    rows = fleet.status().get("decisions") or []
    return [row for row in rows if row["what"] == "replicas" and int(row["to"]) > int(row["from"])]


@asynccontextmanager
async def frozen(fleet: Fleet) -> AsyncIterator[None]:
    """Prometheus takes connections and answers nothing."""
    fleet.engines.signal(signal.SIGSTOP)
    yield
    fleet.engines.signal(signal.SIGCONT)


@asynccontextmanager
async def garbage(fleet: Fleet) -> AsyncIterator[None]:
    """Something else answers in its place."""
    fleet.engines.fault = "<html>Bad gateway</html>"
    yield
    fleet.engines.fault = ""


@asynccontextmanager
async def nonsense(fleet: Fleet) -> AsyncIterator[None]:
    """Answers of the right shape with no series in them."""
    fleet.engines.fault = (
        '{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod":[]},'
        '"value":[0,"NaN"]}]}}'
    )
    yield
    fleet.engines.fault = ""


@asynccontextmanager
async def emptied(fleet: Fleet) -> AsyncIterator[None]:
    """Prometheus forgets its targets: series end."""
    fleet.engines.hides_targets = True
    yield
    fleet.engines.hides_targets = False


async def each_loss_is_shown_and_ends(fleet: Fleet) -> None:
    """Within 30 s in the status, decisions going on from direct reads; closed again two scrapes later."""
    for fault in (frozen, garbage, nonsense, emptied):
        async with fault(fleet):
            took_s = await fleet.engines.until_source(fleet.operator, "chat", 1.0)
            assert took_s < 2 * SHOWN_S, fault.__name__
            if fault is frozen:
                await shown_while_frozen(fleet)
            assert fleet.is_measured("chat"), "replicas are read directly"
        took_s = await fleet.engines.until_source(fleet.operator, "chat", 0.0)
        assert took_s < 3 * BACK_S, fault.__name__
        fleet.assert_never_lowered()


async def shown_while_frozen(fleet: Fleet) -> None:
    """What `kubectl get fis` shows."""
    await fleet.world.until(
        "the loss shown",
        lambda: "prometheus lost" in fleet.status()["summary"]["breaker"],
        timeout_s=2 * SHOWN_S,
    )
    assert fleet.status()["breaker"]["source"] == "Open"


async def kills_lower_nothing(fleet: Fleet) -> None:
    """The load goes away and leaders die one after the other, at any moment: none of them lowers anything."""
    random = Random(time.time_ns())
    before = fleet.replicas()
    assert before > 2
    newest = max(order.generation for order in fleet.engines.orders)
    fleet.engines.rate_per_s = {"chat": 0.0, "told": 0.0}
    for _ in range(KILLS):
        await asyncio.sleep(random.uniform(0.0, 4.0))
        fleet.operator.kill()
        assert fleet.replicas() == before
        await fleet.operator.start().leads()
    await fleet.engines.until_source(fleet.operator, "chat", 0.0)
    await fleet.world.until(
        "newer orders",
        lambda: any(order.generation > newest for order in fleet.engines.orders),
    )
    assert fleet.replicas() == before


def orders_rise_over_leaders(fleet: Fleet) -> None:
    """No pod is ever sent an older order than it has, and pods of a service that is only advised get none at all."""
    assert not [order for order in fleet.engines.orders if order.pod.startswith("told")]
    latest: dict[str, tuple[int, int]] = {}
    for order in fleet.engines.orders:
        now = (order.epoch, order.generation)
        assert latest.get(order.pod, (0, 0)) <= now, order
        latest[order.pod] = now
