"""Pods answer with garbage, gigabytes, one byte a second and other pods' labels; control goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import LoopbackEngines, loopback_engines
from tests.support.autoscale.hostile_engine import Hostility
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, condition, operator_world, service

CALM_PER_S: Final = 4.0
BUSY_PER_S: Final = 40.0
READS: Final = 6
"""Reads that each hostile pod has answered before the good service is put under load."""
MEMORY_LIMIT_BYTES: Final = 512 * 1024**2
"""The operator's default limit in the chart's values."""
NAMES: Final = {how: how.name.lower() for how in Hostility}


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "fault-pod") as found:
        yield found


@pytest_asyncio.fixture
async def engines(control_plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    async with loopback_engines(control_plane, world) as found:
        yield found


def spec(engines: LoopbackEngines, replicas: int) -> dict[str, Any]:
    """Return a spec of small engines that scales up from `replicas`."""
    return {
        "placement": engines.placement,
        "scaling": {"mode": "Auto", "minReplicas": replicas, "maxReplicas": 6},
        "batching": {"mode": "Auto", "minSequences": 8, "maxSequences": 8},
        "objectives": {"queueWaitMilliseconds": 500, "batchTimeMilliseconds": 50},
    }


async def test_hostile_pods_stop_no_decision_about_others(
    world: World, engines: LoopbackEngines
) -> None:
    engines.rate_per_s = {"good": CALM_PER_S, **dict.fromkeys(NAMES.values(), CALM_PER_S)}
    operator = await engines.operator().start().leads()
    await world.create(service("good", **spec(engines, 2)))
    for name in NAMES.values():
        await world.create(service(name, **spec(engines, 1)))
    await world.ready("good", *NAMES.values())
    await engines.grow("good", 2)
    for name in NAMES.values():
        await engines.grow(name, 1)
    await world.until("good is measured", lambda: is_measured(world), GUARD_S)

    engines.hostile = {name: how for how, name in NAMES.items()}
    async with asyncio.timeout(GUARD_S):
        while any(engines.hostile_reads[name] < READS for name in NAMES.values()):  # noqa: ASYNC110 - of pods
            await asyncio.sleep(0.2)
    began = time.monotonic()
    engines.rate_per_s["good"] = BUSY_PER_S
    await world.until("good is scaled up", lambda: replicas(world, "good") > 2, GUARD_S)
    print(f"scaled up {time.monotonic() - began:.1f} s after the load rose")
    await world.until("good is still measured", lambda: is_measured(world), GUARD_S)
    peak = operator.peak_bytes()
    print(
        f"peak RSS of the operator: {peak / 1024**2:.0f} MiB; reads {dict(engines.hostile_reads)}"
    )
    assert peak < MEMORY_LIMIT_BYTES
    assert operator.alive
    assert not operator.tracebacks()


def is_measured(world: World) -> bool:
    """Return whether fresh samples of the good service come from Prometheus."""
    row = condition(world.fis("good"), "MetricsAvailable")
    return row.get("status") == "True" and "from Prometheus" in row["message"]


def replicas(world: World, name: str) -> int:
    """Return what the service's Deployment asks for."""
    return int((world.get("Deployment", name) or {})["spec"]["replicas"])
