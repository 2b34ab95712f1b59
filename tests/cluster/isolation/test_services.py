"""A defect at one service, in the real operator on a real API server: that service says so, others run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, condition, operator_world, service


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "isolation-services") as found:
        yield found


@pytest.mark.parametrize(
    "step", ["reconciler.controller.decide_plan", "autoscaler.loop.decide_service"]
)
async def test_a_defect_at_one_service_is_shown_there_and_ends_with_its_cause(
    world: World, step: str
) -> None:
    operator = world.operator(env={"FLEETKEEPER_CONTROL_ENABLED": "true"})
    await operator.start(BREAK=f"{step}:bad").leads()
    await world.create(service("bad"))
    await world.create(service("good"))
    await world.ready("good")
    await world.until(
        "bad is degraded",
        lambda: condition(world.fis("bad"), "Degraded").get("reason") == "InternalError",
    )
    message = condition(world.fis("bad"), "Degraded")["message"]
    assert "RecursionError" in message
    await world.until(
        "good is controlled", lambda: "breaker" in ((world.fis("good") or {}).get("status") or {})
    )
    assert condition(world.fis("good"), "Degraded").get("reason") != "InternalError"
    assert (await operator.metric("fleetkeeper_defects_total") or 0.0) >= 1.0
    told = await world.wait_for_event("bad", "Warning", message)
    assert [event["reason"] for event in told] == ["InternalError"]

    assert await operator.stop() == 0
    await operator.start().leads()
    await world.ready("bad")
    await world.until(
        "bad is well again",
        lambda: condition(world.fis("bad"), "Degraded").get("status") == "False",
    )
