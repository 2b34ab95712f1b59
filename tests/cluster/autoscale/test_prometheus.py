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

import pytest
import pytest_asyncio
from aiohttp import encode_basic_auth

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import PASSWORD, LoopbackEngines, loopback_engines
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import World, condition, operator_world, service

CALM_PER_S = 4.0
BUSY_PER_S = 40.0
SHOWN_S = 120.0
"""A lost Prometheus stands in the status within this; a started one is believed within this."""
BACK_S = 60.0
"""Two scrapes and two ticks of a second each, and what a busy machine adds."""
KILLS = 2


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
        self.operator: OperatorProcess = engines.operator()
        self.seen: dict[str, list[int]] = {"chat": [], "told": []}
        self.breaker: set[str] = set()

    def replicas(self, name: str = "chat") -> int:
        """What the Deployment orders."""
        live = self.world.get("Deployment", name)
        return int(live["spec"]["replicas"]) if live is not None else 0

    def status(self, name: str = "chat") -> dict[str, Any]:
        """The service's status."""
        return dict((self.world.fis(name) or {}).get("status") or {})

    def measured(self, name: str = "chat") -> str:
        """How fresh samples of it come, in the status' words; empty while none do."""
        row = condition(self.world.fis(name), "MetricsAvailable")
        return str(row["message"]) if row.get("status") == "True" else ""

    def is_read_from_prometheus(self, name: str = "chat") -> bool:
        """Whether the status says that samples come from Prometheus, and that it is not lost."""
        shown = (self.status(name).get("summary") or {}).get("breaker", "")
        return "prometheus lost" not in shown and "from Prometheus" in self.measured(name)

    def is_read_directly(self) -> bool:
        """Whether the status says that Prometheus is lost and the pods are asked themselves."""
        shown = "prometheus lost" in self.status()["summary"]["breaker"]
        return shown and "read directly" in self.measured()

    async def watch(self) -> None:
        """Notes every number of replicas that is ever ordered, and every state of the control breaker."""
        while True:
            for name, seen in self.seen.items():
                replicas = self.replicas(name)
                if replicas and (not seen or seen[-1] != replicas):
                    seen.append(replicas)
            if state := (self.status().get("breaker") or {}).get("control"):
                self.breaker.add(state)
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


@pytest.mark.exhaustive
async def test_load_raises_replicas_and_no_fault_or_kill_lowers_them(fleet: Fleet) -> None:
    """From a calm fleet through a stopped Prometheus with load, other losses, and kills of the operator."""
    await a_calm_fleet_is_measured(fleet)
    async with stopped(fleet):
        await load_raises_replicas(fleet)
    await only_the_wish_is_told_of_an_advised_one(fleet)
    for fault in (frozen, strange, emptied):
        async with fault(fleet):
            await decisions_go_on_from_direct_reads(fleet)
    await kills_lower_nothing(fleet)
    await the_raise_is_told_once(fleet)
    orders_rise_over_leaders(fleet)
    fleet.assert_never_lowered()
    assert fleet.breaker == {"Closed"}
    await the_password_stands_nowhere(fleet)


async def a_calm_fleet_is_measured(fleet: Fleet) -> None:
    """Both services get two replicas, and samples of them come from Prometheus."""
    fleet.engines.rate_per_s = {"chat": CALM_PER_S, "told": CALM_PER_S}
    await fleet.operator.start().leads()
    await fleet.world.create(service("chat", **spec(fleet.engines, "Auto")))
    await fleet.world.create(service("told", **spec(fleet.engines, "Advisory")))
    await fleet.world.ready("chat", "told")
    for name in ("chat", "told"):
        await fleet.engines.grow(name, 2)
    for name in ("chat", "told"):
        await fleet.world.until(f"{name} measured", partial(fleet.is_read_from_prometheus, name))
        assert fleet.status(name)["breaker"]["source"] == "Closed"
    assert fleet.replicas("chat") == fleet.replicas("told") == 2


@asynccontextmanager
async def stopped(fleet: Fleet) -> AsyncIterator[None]:
    """Prometheus ends, and is started again: shown, decided on without it, and believed again in time."""
    await fleet.engines.stop_prometheus()
    await fleet.world.until("the loss shown", fleet.is_read_directly, timeout_s=SHOWN_S)
    assert fleet.status()["breaker"]["source"] == "Open"
    yield
    await fleet.engines.start_prometheus()
    await fleet.engines.until_source(fleet.operator, "chat", 0.0, timeout_s=SHOWN_S)
    await fleet.world.until("its return shown", fleet.is_read_from_prometheus, timeout_s=SHOWN_S)


async def load_raises_replicas(fleet: Fleet) -> None:
    """Ten times the load: replicas are ordered, and it is said why, once."""
    fleet.engines.rate_per_s = {"chat": BUSY_PER_S, "told": BUSY_PER_S}
    await fleet.world.until("replicas raised", lambda: fleet.replicas() > 2)
    await fleet.world.until("a decision told", lambda: _raises(fleet))
    await fleet.engines.grow("chat", fleet.replicas())
    await the_raise_is_told_once(fleet)


async def the_raise_is_told_once(fleet: Fleet) -> None:
    """One event a happening, by every leader together."""
    raised = await fleet.world.wait_for_event("chat", "Normal", "Replicas 2 -> ")
    assert [event["reason"] for event in raised] == ["Scaled"]


async def only_the_wish_is_told_of_an_advised_one(fleet: Fleet) -> None:
    """Advisory says what it would order, and orders nothing."""
    await fleet.world.until(
        "the wish told", lambda: fleet.status("told")["scaling"].get("wanted", 0) > 2
    )
    assert fleet.replicas("told") == 2
    limited = condition(fleet.world.fis("told"), "ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "Advisory")


def _raises(fleet: Fleet) -> list[dict[str, Any]]:
    rows = fleet.status().get("decisions") or []
    return [row for row in rows if row["what"] == "replicas" and int(row["to"]) > int(row["from"])]


@asynccontextmanager
async def frozen(fleet: Fleet) -> AsyncIterator[None]:
    """Prometheus takes connections and answers nothing."""
    fleet.engines.signal(signal.SIGSTOP)
    await fleet.engines.until_source(fleet.operator, "chat", 1.0, timeout_s=SHOWN_S)
    yield
    fleet.engines.signal(signal.SIGCONT)
    await fleet.engines.until_source(fleet.operator, "chat", 0.0, timeout_s=BACK_S)


@asynccontextmanager
async def strange(fleet: Fleet) -> AsyncIterator[None]:
    """Something else answers in its place; then answers of the right shape with no series in them."""
    fleet.engines.fault = "<html>Bad gateway</html>"
    await fleet.engines.until_source(fleet.operator, "chat", 1.0, timeout_s=SHOWN_S)
    yield
    fleet.engines.fault = (
        '{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod":[]},'
        '"value":[0,"NaN"]}]}}'
    )
    await decisions_go_on_from_direct_reads(fleet)
    assert await fleet.engines.source_state(fleet.operator, "chat") == 1.0
    fleet.engines.fault = ""
    await fleet.engines.until_source(fleet.operator, "chat", 0.0, timeout_s=BACK_S)


@asynccontextmanager
async def emptied(fleet: Fleet) -> AsyncIterator[None]:
    """Prometheus forgets its targets: series end."""
    fleet.engines.hides_targets = True
    await fleet.engines.until_source(fleet.operator, "chat", 1.0, timeout_s=SHOWN_S)
    yield
    fleet.engines.hides_targets = False
    await fleet.engines.until_source(fleet.operator, "chat", 0.0, timeout_s=BACK_S)


async def decisions_go_on_from_direct_reads(fleet: Fleet) -> None:
    """The pods themselves are asked, tick for tick, and their samples count."""
    before = fleet.engines.direct_reads
    await fleet.world.until(
        "direct reads", lambda: fleet.engines.direct_reads >= before + 2 * fleet.replicas()
    )
    assert fleet.measured()
    fleet.assert_never_lowered()


async def kills_lower_nothing(fleet: Fleet) -> None:
    """The load goes away and leaders die one after the other, at any moment: none of them lowers anything.

    The last one's place is taken by another pod, once the lease has run out.
    """
    random = Random(time.time_ns())
    before = fleet.replicas()
    assert before > 2
    fleet.engines.rate_per_s = {"chat": 0.0, "told": 0.0}
    for number in range(KILLS):
        await asyncio.sleep(random.uniform(0.0, 3.0))
        fleet.operator.kill()
        assert fleet.replicas() == before
        newest = max((order.epoch, order.generation) for order in fleet.engines.received)
        if number == KILLS - 1:
            fleet.operator = fleet.engines.operator("other")
        await fleet.operator.start().leads()
        await fleet.world.until("newer orders", partial(_has_newer, fleet, newest))
    assert fleet.replicas() == before


async def the_password_stands_nowhere(fleet: Fleet) -> None:
    """Prometheus got it with every query; no log line, object, event or status has it."""
    assert fleet.engines.authorizations == {encode_basic_auth("reader", PASSWORD)}
    logs = "".join(file.read_text() for file in fleet.world.directory.glob("operator-*.log"))
    assert "starting" in logs
    assert PASSWORD not in logs
    assert PASSWORD not in str(fleet.world.objects)
    for name in ("chat", "told"):
        assert PASSWORD not in str(await fleet.world.events_of(name))


def _has_newer(fleet: Fleet, newest: tuple[int, int]) -> bool:
    return any((order.epoch, order.generation) > newest for order in fleet.engines.received)


def orders_rise_over_leaders(fleet: Fleet) -> None:
    """A pod that takes the lead has an epoch of its own; no engine is ever sent an older order than it has;
    those of a service that is only advised get none at all.
    """
    assert not [order for order in fleet.engines.received if order.pod.startswith("told")]
    assert len({order.epoch for order in fleet.engines.received}) == 2
    latest: dict[str, tuple[int, int]] = {}
    for order in fleet.engines.received:
        now = (order.epoch, order.generation)
        assert latest.get(order.pod, (0, 0)) <= now, order
        latest[order.pod] = now
