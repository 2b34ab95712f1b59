"""A restart of the real operator, with control on and metrics that cannot be read, writes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import EVENT
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.autoscale.control_world import SHORT_TICKS
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import Live, World, condition, operator_world, service

NAMES = tuple(f"chat-{number:02}" for number in range(5))
RATE_S = 6.0
WARM_UP_S = 5.0
WAITS = {
    **SHORT_TICKS,
    "autoscale.constants.RATE_S": RATE_S,
    "autoscale.signals.pod_history.WARM_UP_S": WARM_UP_S,
    "runtime.autoscaler.fleet_events.GATHER_S": 3.0,
}
"""Five times shorter than usual, as the ticks; pods are grown after 5 s instead of a minute."""
JUDGED_TICKS = int(RATE_S) + 6
"""Time for signals to come, three ticks of silence, and three more: all that a new process does."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "isolation-restart") as found:
        yield found


async def judged(operator: OperatorProcess) -> None:
    """Waits until the control loop of this process has ticked often enough to judge every service."""
    async with asyncio.timeout(GUARD_S):
        while (await operator.metric("fleetkeeper_tick_seconds_count") or 0.0) < JUDGED_TICKS:
            assert operator.alive
            await asyncio.sleep(0.5)


async def grown(world: World) -> None:
    """Makes the services without a control loop, and waits until their pods are warmed up.

    Then all lose their metrics in the same tick, as they do when Prometheus falls silent.
    """
    operator = await world.operator().start().leads()
    for name in NAMES:
        await world.create(service(name))
    await world.ready(*NAMES)
    assert await operator.stop() == 0
    await world.until("pods are grown", lambda: all(map(_is_grown, _pods(world))), GUARD_S)


def _pods(world: World) -> list[Live]:
    found = [live for (kind, _), live in world.objects.items() if kind == "Pod"]
    assert len(found) == len(NAMES)
    return found


def _is_grown(pod: Live) -> bool:
    ready = condition(pod, "Ready")
    since = datetime.fromisoformat(ready["lastTransitionTime"])
    return (datetime.now(UTC) - since).total_seconds() > WARM_UP_S


async def told(world: World) -> Counter[tuple[str, str]]:
    """The events about lost metrics, by the kind of object that they are about."""
    found = await world.client.request("GET", EVENT.path(world.namespace))
    return Counter(
        (event["involvedObject"]["kind"], event["reason"])
        for event in found["items"]
        if event["reason"] in {"ControlBreakerOpen", "PrometheusLost"}
    )


@pytest.mark.promise("restart-writes-nothing")
async def test_a_restart_without_metrics_writes_nothing_and_the_fleet_was_told_once(
    world: World,
) -> None:
    await grown(world)
    operator = world.operator(
        waits=WAITS,
        env={
            "FLEETKEEPER_CONTROL_ENABLED": "true",
            "FLEETKEEPER_PROMETHEUS_URL": f"http://127.0.0.1:{free_ports(1)[0]}",
        },
    )
    await operator.start().leads()
    await world.until(
        "every service says that it is blind",
        lambda: (
            {condition(world.fis(name), "Degraded").get("reason") for name in NAMES}
            == {"ControlBreakerOpen"}
        ),
        GUARD_S,
    )
    lease = {("Lease", "ControlBreakerOpen"): 1, ("Lease", "PrometheusLost"): 1}
    async with asyncio.timeout(GUARD_S):
        while (events := await told(world)) != lease:
            assert len(events) <= len(lease), events
            await asyncio.sleep(0.5)
    await world.quiet()
    before = {name: (world.fis(name) or {})["status"] for name in NAMES}

    mark = world.mark()
    assert await operator.stop() == 0
    await operator.start().leads()
    await judged(operator)
    assert world.writes(mark, events=True) == []
    assert {name: (world.fis(name) or {})["status"] for name in NAMES} == before
    assert await told(world) == lease
