"""A server that asks for a pause costs the leader no renewal: the lease has a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes import resources
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, operator_world, service
from tests.support.plane.watch_proxy import WatchProxy

LEASE = {
    "FLEETKEEPER_LEADER__DURATION_S": "30",
    "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "15",
    "FLEETKEEPER_LEADER__RETRY_S": "1",
}
RENEWALS = 20
"""At one each second: longer than the deadline."""
NAMES = [f"chat{number}" for number in range(4)]


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "isolation-lease") as found:
        yield found


async def _renewals(world: World, count: int) -> set[tuple[str, int]]:
    """Wait for so many renewals; the holders seen, and the number of changes of leader."""
    times: set[str] = set()
    seen: set[tuple[str, int]] = set()
    async with asyncio.timeout(240):
        while len(times) < count:
            lease = await world.client.read(resources.LEASE, world.namespace, "fleetkeeper")
            assert lease is not None
            assert world.processes[0].alive, world.processes[0].log.read_text()[-3000:]
            spec = lease["spec"]
            times.add(spec["renewTime"])
            seen.add((spec["holderIdentity"], spec["leaseTransitions"]))
            await asyncio.sleep(0.2)
    return seen


def _has_replicas(world: World, name: str, count: int) -> bool:
    live = world.get("Deployment", name)
    return live is not None and live["spec"]["replicas"] == count


@pytest.mark.timeout(400)
async def test_renewals_go_on_while_the_server_answers_429_to_all_else(world: World) -> None:
    async with WatchProxy(world.plane, world.user) as proxy:
        operator = world.operator(
            kubeconfig=proxy.kubeconfig,
            env=LEASE,
            waits={"fleetkeeper_kube.slots.MAX_RETRY_AFTER_S": 3.0},
        )
        await operator.start(FLEETKEEPER_REQUESTS_IN_FLIGHT="4").leads()
        for name in NAMES:
            await world.create(service(name, replicas=1))
        await world.ready(*NAMES)
        await world.quiet()
        proxy.limit(spare="leases")
        for name in NAMES:
            await world.change(name, replicas=2)
        await world.until("a 429", lambda: proxy.limited)
        seen = await _renewals(world, RENEWALS)
        proxy.limit(spare=None)
        for name in NAMES:
            await world.until(f"{name} scaled", partial(_has_replicas, world, name, 2), GUARD_S)
        assert len(seen) == 1, "the leader changed"
        assert operator.alive
