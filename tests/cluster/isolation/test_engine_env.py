"""An upgrade that refuses a variable: what runs with it goes on, on a real API server."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, condition, operator_world, service

WORDS = "can only be set by the administrator"


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "engine-env") as found:
        yield found


def former_crd() -> dict[str, Any]:
    """The CRD as it was before it knew which variables are the administrator's."""
    crd = copy.deepcopy(desired_crd())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    engine = schema["properties"]["spec"]["properties"]["engine"]
    variable = engine["properties"]["env"]["items"]
    rules = variable["x-kubernetes-validations"]
    variable["x-kubernetes-validations"] = [rule for rule in rules if WORDS not in rule["message"]]
    assert len(variable["x-kubernetes-validations"]) == len(rules) - 1
    return crd


async def install(world: World, crd: dict[str, Any], *, refuses: bool) -> None:
    """Applies the CRD and waits until the API server goes by it."""
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    world.plane.kubectl(*apply, input=json.dumps(crd))
    probe = service("probe", engine={"env": [{"name": "HF_ENDPOINT", "value": "https://x"}]})

    def goes_by_it() -> bool:
        try:
            world.plane.kubectl(
                "-n", world.namespace, *apply, "--dry-run=server", input=json.dumps(probe)
            )
        except KubectlError as problem:
            return refuses and WORDS in str(problem)
        return not refuses

    await world.until("the CRD in force", goes_by_it)


def _deployment(world: World) -> tuple[Any, ...]:
    """What a write to the engine Deployment would change; its status is not ours."""
    live = world.get("Deployment", "chat")
    assert live is not None
    return live["metadata"]["uid"], live["metadata"]["generation"], live["spec"]


async def test_a_service_with_a_variable_that_is_refused_now_keeps_its_pods(world: World) -> None:
    """It is Stalled and says why; no child is written, and taking the variable out heals it."""
    first = await world.operator().start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    await first.stop()
    await install(world, former_crd(), refuses=False)
    env = [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]
    await world.change(engine={"profile": "cuda", "env": env})
    before = _deployment(world)
    pods = {name for kind, name in world.objects if kind == "Pod"}
    await install(world, desired_crd(), refuses=True)
    mark = world.mark()
    await world.operator("b").start().leads()
    await world.until(
        "Stalled", lambda: condition(world.fis(), "Stalled").get("reason") == "InvalidSpec"
    )
    assert WORDS in condition(world.fis(), "Stalled")["message"]
    await world.until("the write in the audit log", lambda: world.writes(mark))
    assert {write.resource for write in world.writes(mark)} == {"inferenceservices/status"}
    assert _deployment(world) == before
    assert {name for kind, name in world.objects if kind == "Pod"} == pods
    await world.change(engine={"profile": "cuda", "env": None})
    await world.ready()
    assert _deployment(world) == before
