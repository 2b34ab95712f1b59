"""Flux and Argo CD apply the same manifests again and again while the autoscaler works: nobody fights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import LoopbackEngines, loopback_engines
from tests.support.operators.operator_world import Live, World, condition, operator_world, service

FLUX, ARGO = "by-flux", "by-argo"
"""The services, by who applies them."""
NAMES: Final = (FLUX, ARGO)
MANAGERS: Final = {FLUX: "kustomize-controller", ARGO: "argocd-controller"}
APPLY: Final = {FLUX: ("--server-side",), ARGO: ()}
"""Flux also forces; without that, the API server reports a conflict of ownership."""
CALM_PER_S, BUSY_PER_S = 4.0, 40.0
PATIENCE_S = 300.0
ROUNDS_A_LOAD = 10
WRITTEN = {"deployments", "inferenceservices/status", "pods"}
"""Pods are only marked for which of them to remove first."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-reapply") as found:
        yield found


@pytest_asyncio.fixture
async def engines(control_plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    async with loopback_engines(control_plane, world) as found:
        yield found


def manifest(engines: LoopbackEngines, name: str) -> Live:
    """Return what Git has: two to six small replicas."""
    return service(
        name,
        placement=engines.placement,
        scaling={"minReplicas": 2, "maxReplicas": 6, "scaleDownDelaySeconds": 60},
        batching={"mode": "Auto", "minSequences": 8, "maxSequences": 8},
        objectives={"queueWaitMilliseconds": 500, "batchTimeMilliseconds": 50},
    )


async def apply(world: World, engines: LoopbackEngines, name: str) -> str:
    """Apply a manifest as its tool does.

    Raises:
        KubectlError: the API server refused, for example because somebody else owns a field.
    """
    return await asyncio.to_thread(
        world.plane.kubectl,
        *("-n", world.namespace, "apply", *APPLY[name]),
        *(f"--field-manager={MANAGERS[name]}", "-f", "-"),
        input=json.dumps(manifest(engines, name)),
    )


def deployment(world: World, name: str) -> Live:
    found = world.get("Deployment", name)
    assert found is not None
    return found


def replicas(world: World, name: str) -> int:
    return int(deployment(world, name)["spec"]["replicas"])


def fixed_part(world: World, name: str) -> dict[str, Any]:
    """Return the Deployment's spec without the replicas."""
    return {
        key: value for key, value in deployment(world, name)["spec"].items() if key != "replicas"
    }


def changes(world: World, name: str) -> int:
    """Return the generation of the Deployment, which every change of its spec raises by one."""
    return int(deployment(world, name)["metadata"]["generation"])


async def prepare(world: World, engines: LoopbackEngines) -> None:
    """Apply both services the first time, and wait until the autoscaler has measured them."""
    engines.rate_per_s = dict.fromkeys(NAMES, CALM_PER_S)
    await engines.operator().start().leads()
    for name in NAMES:
        await apply(world, engines, name)
    await world.ready(*NAMES)
    for name in NAMES:
        await engines.grow(name, 2)
    await world.until(
        "both are measured",
        lambda: all(
            condition(world.fis(name), "MetricsAvailable").get("status") == "True" for name in NAMES
        ),
    )
    assert {name: replicas(world, name) for name in NAMES} == dict.fromkeys(NAMES, 2)


async def apply_again(world: World, engines: LoopbackEngines, rounds: int, period_s: float) -> None:
    """Apply both in every round while the load changes; go on until the autoscaler has acted."""
    number = 0
    raised: set[str] = set()
    async with asyncio.timeout(rounds * period_s + PATIENCE_S):
        while number < rounds or raised != set(NAMES):
            calm = raised == set(NAMES) and number // ROUNDS_A_LOAD % 2
            engines.rate_per_s = dict.fromkeys(NAMES, CALM_PER_S if calm else BUSY_PER_S)
            ends = time.monotonic() + period_s
            assert "serverside-applied" in await apply(world, engines, FLUX)
            assert "unchanged" in await apply(world, engines, ARGO)
            raised |= {name for name in NAMES if replicas(world, name) > 2}
            await asyncio.sleep(max(0.0, ends - time.monotonic()))
            number += 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rounds", "period_s"), [(8, 1.0), pytest.param(30, 10.0, marks=pytest.mark.exhaustive)]
)
async def test_applying_again_changes_nothing_while_the_autoscaler_scales(
    world: World, engines: LoopbackEngines, rounds: int, period_s: float
) -> None:
    await prepare(world, engines)
    mark = world.mark()
    before = {name: (fixed_part(world, name), changes(world, name)) for name in NAMES}

    await apply_again(world, engines, rounds, period_s)

    def orders_written() -> bool:
        scaled = sum(changes(world, name) - before[name][1] for name in NAMES)
        return world.accepted_writes(mark)["deployments"] == scaled >= len(NAMES)

    await world.until("every write of a Deployment changed its replicas", orders_written)
    assert world.accepted_writes(mark).keys() <= WRITTEN
    for name in NAMES:
        assert fixed_part(world, name) == before[name][0]
        live = await asyncio.to_thread(_with_owners, world, name)
        assert live["metadata"]["generation"] == 1
        assert "replicas" not in live["spec"], "the autoscaler's number is only in the Deployment"
        owners = {
            row["manager"]
            for row in live["metadata"]["managedFields"]
            if "f:spec" in row["fieldsV1"]
        }
        assert owners == {MANAGERS[name]}


def _with_owners(world: World, name: str) -> Live:
    got = world.plane.kubectl(
        *("-n", world.namespace, "get", INFERENCE_SERVICE.kind, name),
        *("--show-managed-fields", "-o", "json"),
    )
    found: Live = json.loads(got)
    return found
