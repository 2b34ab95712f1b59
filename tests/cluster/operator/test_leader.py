"""One leader at a time: failover, a stopped process, a clean end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import STOCK
from tests.support.operators.operator_world import World, operator_world, service

IS_READY = ('inference_service="chat"', 'type="Ready"', 'status="true"')
LONG_LEASE = {
    "FLEETKEEPER_LEADER__DURATION_S": "240",
    "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "200",
}
"""Longer than any wait here: who leads sooner did not wait for this Lease to expire."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-leader") as found:
        yield found


def _holder(world: World) -> str:
    text = world.plane.kubectl("-n", world.namespace, "get", "lease", "fleetkeeper", "-o", "json")
    return str(json.loads(text)["spec"].get("holderIdentity", ""))


async def _stands_by(world: World, name: str, **environment: str) -> None:
    """Starts a second process and waits until its caches are complete."""
    standby = world.operator(name).start(**environment)
    async with asyncio.timeout(240):
        while not (await standby.metric("fleetkeeper_records") or 0.0):
            assert standby.alive, standby.log.read_text()[-2000:]
            await asyncio.sleep(0.1)


async def test_a_standby_takes_over_from_a_dead_leader(world: World) -> None:
    first = await world.operator("a").start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    await _stands_by(world, "b")
    standby = world.processes[1]
    assert await standby.metric("fleetkeeper_leader") == 0.0
    assert await first.metric("fleetkeeper_service_condition", *IS_READY) == 1.0
    assert await standby.metric("fleetkeeper_service_condition", *IS_READY) is None
    mark = world.mark()
    first.kill()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await world.change(replicas=2)
    await world.until(
        "scaled by the standby",
        lambda: (world.get("Deployment", "chat") or {})["spec"]["replicas"] == 2,
        timeout_s=GUARD_S,
    )
    print(f"failover in {loop.time() - began:.1f} s")
    assert _holder(world) == "b"
    assert world.accepted_writes(mark)["deployments"] == 1
    assert await standby.metric("fleetkeeper_service_condition", *IS_READY) is not None
    await world.delete(INFERENCE_SERVICE, "chat")
    async with asyncio.timeout(GUARD_S):
        while await standby.metric("fleetkeeper_service_condition") is not None:
            assert standby.alive, standby.log.read_text()[-2000:]
            await asyncio.sleep(0.1)


async def test_sigterm_ends_in_time_and_frees_the_lease(world: World) -> None:
    first = await world.operator("a", command=STOCK).start(**LONG_LEASE).leads()
    await world.create(service())
    await world.ready()
    await _stands_by(world, "b", **LONG_LEASE)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await first.stop() == 0
    ended = loop.time() - began
    assert ended < 10
    await world.processes[1].leads()
    print(f"ended in {ended:.1f} s, taken over after {loop.time() - began:.1f} s")
    assert _holder(world) == "b"


@pytest.mark.promise("one-leader")
async def test_a_stopped_leader_sends_no_write_when_it_wakes(world: World) -> None:
    first = await world.operator("a").start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    await _stands_by(world, "b")
    first.signal(signal.SIGSTOP)
    await world.processes[1].leads(timeout_s=GUARD_S)
    await world.quiet()
    # What the old leader finds when it wakes wants a write: the change comes while it sleeps.
    world.processes[1].signal(signal.SIGSTOP)
    await world.change(replicas=3)
    mark = world.mark()
    first.signal(signal.SIGCONT)
    assert await first.ended() == 1
    assert world.writes(mark) == []
    world.processes[1].signal(signal.SIGCONT)


async def test_a_restarted_container_does_not_wait_for_its_own_lease(world: World) -> None:
    first = await world.operator("a").start(**LONG_LEASE).leads()
    await world.create(service(replicas=1))
    await world.ready()
    first.kill()
    await first.start(**LONG_LEASE).leads()
