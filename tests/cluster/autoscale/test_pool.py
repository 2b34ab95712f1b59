"""Services that share two accelerators: a real API server, operators that are killed, engines that are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import LoopbackEngines, loopback_engines
from tests.support.gateway.gateway_world import MARKS
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import Live, World, condition, operator_world, service
from tests.support.operators.wake_marks import CONFIG_MAP, mark, settings_with_marks

ACCELERATORS = 2
BUSY_PER_S = 2.0
NAMES = ("busy", "idle", "late")
WAKE_LACKS_S = 3.0
OTHER_NODES = "example.com/pool"
SHORTER = {
    "autoscale.rules.idle.EARLY_IDLE_S": 6.0,
    "autoscale.arbitrate.WAKE_LACKS_S": WAKE_LACKS_S,
    "reconcile.sleep.REPLACE_AFTER_S": 3.0,
}
"""30, 15 and 60 s for users."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-pool") as made:
        yield made


@pytest_asyncio.fixture
async def engines(control_plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    async with loopback_engines(control_plane, world) as made:
        yield made


class Pool:
    """Three services, and the largest number of pods that they ever had."""

    def __init__(self, world: World, engines: LoopbackEngines) -> None:
        self.world = world
        self.engines = engines
        self.operators: list[OperatorProcess] = []
        self.peak_pods = 0
        self.states: dict[str, set[str | None]] = {}
        """The states of status.sleep that a service ever had."""

    async def start(self, name: str, accelerators: int = ACCELERATORS) -> None:
        """Start an operator with the budget, and wait until it leads."""
        operator = self.engines.operator(name, waits=SHORTER)
        self.operators.append(operator)
        budget = {"FLEETKEEPER_MAX_ACCELERATORS": str(accelerators)}
        await operator.start(**settings_with_marks(self.world), **budget).leads()

    async def create(self, name: str) -> None:
        """Create a service with one replica, which sleeps by itself after an hour."""
        scaling = {"maxReplicas": 1, "sleep": {"afterIdleSeconds": 3600, "minAwakeSeconds": 0}}
        spec = {"access": "Gateway", "placement": self.engines.placement, "scaling": scaling}
        await self.world.create(service(name, **spec))

    def sleep(self, name: str) -> Live:
        """Return its status.sleep."""
        found: Live = ((self.world.fis(name) or {}).get("status") or {}).get("sleep") or {}
        return found

    def pods(self, *names: str) -> list[str]:
        """Return the pods of these services, also those that end."""
        begins = tuple(f"{name}-" for name in names)
        return [pod for kind, pod in self.world.objects if kind == "Pod" and pod.startswith(begins)]

    async def wake(self, name: str) -> None:
        """Mark a service that sleeps, as the gateway does for a request."""
        uid = (self.world.fis(name) or {})["metadata"]["uid"]
        await mark(self.world, **{uid: f"{self.sleep(name)['number']}.standard"})

    async def awake(self, name: str) -> None:
        """Wait until a service runs."""
        await self.world.until(f"{name} awake", lambda: self.sleep(name).get("state") is None)

    async def asleep(self, name: str) -> None:
        """Wait until a service sleeps and its last pod is gone."""
        await self.world.until(
            f"{name} asleep",
            lambda: self.sleep(name).get("state") == SleepState.ASLEEP and not self.pods(name),
        )

    def node_selector(self, name: str) -> Live:
        """Return what the engines of a service require of a node."""
        live = self.world.get("Deployment", name)
        assert live is not None
        found: Live = live["spec"]["template"]["spec"]["nodeSelector"]
        return found

    async def waits_in_vain(self, name: str, periods: int = 5) -> None:
        """Wait for several times as long as a wake waits before others are asked, and see none asked."""
        began = time.monotonic()
        await self.world.until("a wait", lambda: time.monotonic() - began > periods * WAKE_LACKS_S)
        assert self.pods(name) == []
        assert condition(self.world.fis(name), "Available")["reason"] == "GPUBudget"
        assert self.states == {name: {SleepState.ASLEEP, SleepState.WAKING}}

    async def watch(self) -> None:
        """Record the largest number of pods and all states of sleep, until cancelled."""
        while True:
            for name in NAMES:
                if sleep := self.sleep(name):
                    self.states.setdefault(name, set()).add(sleep.get("state"))
            self.peak_pods = max(self.peak_pods, len(self.pods(*NAMES)))
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def pool(world: World, engines: LoopbackEngines) -> AsyncIterator[Pool]:
    """A busy and an idle service hold both accelerators, and a third one sleeps since it found none."""
    found = Pool(world, engines)
    engines.rate_per_s = {"busy": BUSY_PER_S, "idle": 0.0, "late": 0.0}
    await found.start("a")
    await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
    await mark(world)
    watching = asyncio.create_task(found.watch())
    for name in NAMES[:ACCELERATORS]:
        await found.create(name)
        await world.ready(name)
    await found.create("late")
    await world.until("never started", lambda: found.sleep("late").get("neverStarted"))
    yield found
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_what_is_idle_sleeps_for_what_wakes_also_if_the_leader_changes(pool: Pool) -> None:
    """The busy service keeps its replica, and the pods never hold more than the budget."""
    await pool.wake("late")
    await pool.world.until(
        "idle goes to sleep",
        lambda: pool.sleep("idle").get("state") == SleepState.GOING_TO_SLEEP,
    )
    pool.operators[0].kill()
    await pool.start("b")
    await pool.awake("late")
    await pool.asleep("idle")
    assert "service late needed its accelerators" in pool.sleep("idle")["message"]
    recorded = await pool.world.wait_for_event("idle", "Normal", "went to sleep early")
    assert {event["reason"] for event in recorded} == {"Asleep"}

    await pool.wake("idle")
    await pool.awake("idle")
    await pool.asleep("late")
    assert "busy" not in pool.states
    assert pool.peak_pods == ACCELERATORS
    assert [line for each in pool.operators for line in each.tracebacks()] == []


async def test_a_wake_waits_while_all_others_have_requests_or_run_on_other_nodes(
    pool: Pool,
) -> None:
    """And gets its replica when one of them would make room, although its mark was lost meanwhile."""
    pool.engines.rate_per_s["idle"] = BUSY_PER_S
    await pool.wake("late")
    await pool.world.until("waking", lambda: pool.sleep("late").get("state") == SleepState.WAKING)
    await pool.waits_in_vain("late")
    await pool.world.change("late", placement={"nodeSelector": {OTHER_NODES: "only"}})
    await pool.world.until("on other nodes", lambda: OTHER_NODES in pool.node_selector("late"))
    pool.engines.rate_per_s["idle"] = 0.0
    await pool.waits_in_vain("late")

    await pool.world.delete(CONFIG_MAP, MARKS)
    await pool.world.until("created again", lambda: _is_new(pool.world.get("ConfigMap", MARKS)))
    await mark(pool.world)
    await pool.world.change("late", placement={"nodeSelector": {OTHER_NODES: None}})
    await pool.awake("late")
    await pool.asleep("idle")
    assert pool.states.keys() == {"late", "idle"}
    assert pool.peak_pods == ACCELERATORS


@pytest.mark.exhaustive
async def test_a_budget_lowered_while_it_wakes_stops_nothing_that_runs(pool: Pool) -> None:
    """The idle service would sleep in vain, so it runs until the budget has room for both again."""
    await pool.wake("late")
    await pool.world.until("waking", lambda: pool.sleep("late").get("state") == SleepState.WAKING)
    pool.operators[0].kill()
    await pool.start("b", accelerators=ACCELERATORS - 1)
    # A new leader first has to see that a service is idle: without the rule, 5 periods pass too.
    await pool.waits_in_vain("late", periods=20)
    assert len(pool.pods("busy", "idle")) == ACCELERATORS
    pool.operators[1].kill()
    await pool.start("c")
    await pool.awake("late")
    await pool.asleep("idle")
    assert pool.states.keys() == {"late", "idle"}
    assert pool.peak_pods == ACCELERATORS
    assert [line for each in pool.operators for line in each.tracebacks()] == []


def _is_new(marks: Live | None) -> bool:
    return marks is not None and "data" not in marks
