"""The idle time on its way from the pods through the control loop to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.autoscale.signals.samples import Gauges, Source
from fleetkeeper.common.sleep import NOT_IDLE, Idle
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.plan import Plan
from fleetkeeper.reconcile.types import Snapshot
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.reconciler import controller as controller_module
from fleetkeeper.runtime.reconciler.controller import Controller
from fleetkeeper.runtime.reconciler.outcome import Outcome
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper_contract import rfc3339
from tests.support.autoscale.loop_world import World

SLEEPS: dict[str, Any] = {"access": "Gateway", "scaling": {"sleep": {"afterIdleSeconds": 900}}}
GOING = {"sleep": {"number": 1, "state": "GoingToSleep"}, "observedGeneration": 1}


def idle_for(seconds: float) -> Gauges:
    return Gauges(limit_sequences=32.0, kv_capacity_tokens=4e5, grants_demanded=1.0, idle_s=seconds)


class Measured(World):
    """Prometheus has a sample of every pod, and the pods answer."""

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        del now
        self.asked.append(targets)
        source = {
            target.key: Source.DIRECT if target.directly else Source.PROMETHEUS
            for target in targets
        }
        return Readings(
            {
                key: tuple(replace(row, source=source[key]) for row in rows)
                for key, rows in self.samples.items()
            },
            checks=True,
        )

    @property
    def directly(self) -> bool:
        """Whether the last tick read the pods of the one service."""
        (target,) = self.asked[-1]
        return target.directly


async def test_the_planner_hears_once_that_a_service_is_idle() -> None:
    """The pods are read directly for it. A newer read is no news, but a request is."""
    world = Measured()
    key = world.add_service(replicas=1, **SLEEPS)
    await world.ticks(13, gauges=idle_for(884.0))
    assert not world.directly
    await world.ticks(3, gauges=idle_for(899.0))
    assert world.directly
    assert world.loop.view(key).idle == NOT_IDLE
    await world.drained()
    await world.ticks(1, gauges=idle_for(904.0))
    assert world.loop.view(key).idle == Idle(is_idle=True, read_at=world.clock - 5.0)
    assert await world.drained() == {key}
    await world.ticks(2, gauges=idle_for(914.0))
    assert world.loop.view(key).idle == Idle(is_idle=True, read_at=world.clock - 5.0)
    assert await world.drained() == set()
    await world.ticks(1, gauges=idle_for(1.0))
    assert world.loop.view(key).idle == NOT_IDLE
    assert await world.drained() == {key}


async def test_the_pods_of_a_service_that_goes_to_sleep_are_read_at_once() -> None:
    world = Measured()
    world.add_service(replicas=1, **SLEEPS)
    await world.ticks(1, gauges=idle_for(10.0))
    world.put_service(status=GOING, **SLEEPS)
    await world.ticks(2, gauges=idle_for(10.0))
    assert world.directly


@pytest.mark.parametrize("is_new_leader", [False, True])
async def test_an_idle_service_sleeps_early_for_one_that_wakes(*, is_new_leader: bool) -> None:
    """The wake is in the status, so a new leader asks as soon as it has read the pods."""
    world = Measured(context=replace(default_context(), max_accelerators=1))
    world.loop = world.new_leader()
    waking = {
        "number": 3,
        "state": "Waking",
        "since": rfc3339.format(world.clock),
        "tier": "standard",
    }
    key = world.add_service("idle", replicas=1, **SLEEPS)
    world.put_service("idle", {"observedGeneration": 1}, **SLEEPS)
    world.add_service("wakes", replicas=0, **SLEEPS)
    world.put_service("wakes", {"sleep": waking, "observedGeneration": 1}, **SLEEPS)
    await world.ticks(3, gauges=idle_for(60.0))
    assert world.loop.view(key).idle == NOT_IDLE
    if is_new_leader:
        world.loop = world.new_leader()
    await world.drained()
    await world.ticks(6 if is_new_leader else 4, gauges=idle_for(75.0))
    assert {target.key.name for target in world.asked[-1] if target.directly} == {"idle"}
    assert world.loop.view(key).idle == Idle(
        is_idle=True, read_at=world.clock - 5.0, sleeps_for="team-a/wakes"
    )
    assert key in await world.drained()
    await world.ticks(1, gauges=idle_for(1.0))
    assert world.loop.view(key).idle == NOT_IDLE


class Executor:
    """Carries nothing out."""

    async def carry_out(self, key: object, *_: object) -> Outcome:
        return Outcome(key, {})  # type: ignore[arg-type]


async def test_the_planner_gets_what_the_loop_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Snapshot] = []

    def decide(snapshot: Snapshot, *_: object) -> Plan:
        found.append(snapshot)
        return Plan()

    monkeypatch.setattr(controller_module, "decide_plan", decide)
    world = Measured()
    key = world.add_service(replicas=1, **SLEEPS)
    controller = Controller(
        queue=world.queue,
        cache=world.cache,
        client=None,  # type: ignore[arg-type] # nothing is read
        executor=Executor(),  # type: ignore[arg-type]
        metrics=world.operator_metrics,
        defects=world.defects,
        context=default_context(),
        ledger=GpuLedger(world.cache, world.context.gpu_budget),
        now=lambda: world.clock,
        monotonic=lambda: world.clock,
        control=world.loop,
    )
    await world.ticks(20, gauges=idle_for(2000.0))
    await controller.reconcile(key)
    assert [snapshot.idle for snapshot in found] == [Idle(is_idle=True, read_at=world.clock - 5.0)]
