"""A real operator, API server and Prometheus: a hung pod goes on its own word, and on nobody else's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import LoopbackEngines, loopback_engines
from tests.support.operators.operator_process import PATIENCE_S
from tests.support.operators.operator_world import World, condition, operator_world, service

HANG_S = 6.0
"""Of this operator; a minute otherwise."""
KEPT = "pod kept: not confirmed by a direct read"


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-hangs") as found:
        yield found


@pytest_asyncio.fixture
async def engines(control_plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    async with loopback_engines(control_plane, world) as found:
        yield found


def uids(engines: LoopbackEngines, name: str) -> set[str]:
    """The UIDs of a service's pods that are not being deleted."""
    return {pod["metadata"]["uid"] for pod in engines.pods(name)}


def is_measured(world: World, name: str) -> bool:
    """Whether samples come from Prometheus."""
    row = condition(world.fis(name), "MetricsAvailable")
    return row.get("status") == "True" and "from Prometheus" in str(row.get("message"))


async def test_a_hung_pod_is_replaced_and_one_that_prometheus_alone_calls_hung_is_not(
    world: World, engines: LoopbackEngines
) -> None:
    """Both are chosen after `HANG_S` and asked; one confirms. Each keeps its neighbor."""
    spec: dict[str, Any] = {
        "placement": engines.placement,
        "scaling": {"mode": "Advisory", "minReplicas": 2, "maxReplicas": 2},
    }
    engines.rate_per_s = {"hung": 4.0, "slandered": 4.0}
    operator = await engines.operator(waits={"autoscale.constants.HANG_S": HANG_S}).start().leads()
    for name in engines.rate_per_s:
        await world.create(service(name, **spec))
    await world.ready(*engines.rate_per_s)
    for name in engines.rate_per_s:
        await engines.grow(name, 2)
        await world.until(f"{name} measured", partial(is_measured, world, name))
    before = {name: uids(engines, name) for name in engines.rate_per_s}
    hung, well = engines.pods("hung")
    slandered = engines.pods("slandered")[0]["metadata"]["name"]
    engines.hang(hung)
    engines.slandered.add(slandered)
    wait_s = 2 * PATIENCE_S

    def kept() -> list[dict[str, Any]]:
        lines = [line for line in operator.log.read_text().splitlines() if KEPT in line]
        return [json.loads(line) for line in lines]

    await world.until(
        "the hung pod replaced",
        lambda: hung["metadata"]["uid"] not in uids(engines, "hung"),
        timeout_s=wait_s,
    )
    await world.until("the other pod asked", kept, timeout_s=wait_s)
    assert {line["pod"] for line in kept()} == {slandered}
    assert well["metadata"]["uid"] in uids(engines, "hung")
    assert uids(engines, "slandered") == before["slandered"]
    told = await world.wait_for_event("hung", "Warning", hung["metadata"]["name"])
    assert [event["reason"] for event in told] == ["EngineHung"]
    reasons = {event["reason"] for event in await world.events_of("slandered")}
    assert "EngineHung" not in reasons
