"""The clock of the operator's node is wrong: what it writes and decides is by the API server's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import LEASE
from fleetkeeper_contract import rfc3339
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_process import PATIENCE_S
from tests.support.operators.operator_world import World, condition, operator_world, service

HOUR_S = 3600.0


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "wall-clock") as found:
        yield found


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
async def test_times_are_right_and_a_new_revision_gets_its_time(world: World, off_s: float) -> None:
    """An hour ahead would time every roll-out out at once, an hour behind would never."""
    began = datetime.now(UTC).timestamp()
    operator = world.operator(env={"WALL_OFF_S": str(off_s)})
    await operator.start().leads(timeout_s=PATIENCE_S * 2)
    await world.create(service(replicas=1))
    await world.ready()
    await world.change(engine={"profile": "cuda", "options": {"seed": "7"}})
    await world.until(
        "the change is observed",
        lambda: condition(world.fis(), "Ready").get("observedGeneration") == 2,
    )
    await world.ready()
    live = world.fis() or {}
    assert "rollback" not in live["status"]

    lease = await world.client.read(LEASE, world.namespace, "fleetkeeper")
    assert lease is not None
    events = await world.wait_for_event("chat", "Normal")
    written = {
        "renewTime": lease["spec"]["renewTime"],
        **{item["type"]: item["lastTransitionTime"] for item in live["status"]["conditions"]},
        **{f"event {item['reason']}": item["lastTimestamp"] for item in events},
    }
    ended = datetime.now(UTC).timestamp()
    wrong = {
        what: moment
        for what, moment in written.items()
        if not began - 10.0 <= (rfc3339.parse(moment) or 0.0) <= ended + 10.0
    }
    assert wrong == {}
    assert "the node's clock is wrong" in operator.log.read_text()
