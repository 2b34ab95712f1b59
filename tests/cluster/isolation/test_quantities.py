"""A service with a quantity that an older CRD let in concerns nobody else, on a real API server."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_process import PATIENCE_S
from tests.support.operators.operator_rights import CRDS
from tests.support.operators.operator_world import Live, World, condition, operator_world, service

RESOURCES = service()["spec"]["resources"]


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "isolation-quantities") as found:
        yield found


@contextmanager
def older_crd(plane: ControlPlane) -> Iterator[None]:
    """The CRD as it was before quantities had a bound; afterwards the present one."""
    crd: dict[str, Any] = copy.deepcopy(desired_crd())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["resources"]["x-kubernetes-validations"]
    apply = ("apply", "--server-side", "--force-conflicts", "-f")
    plane.kubectl(*apply, "-", input=json.dumps(crd))
    try:
        yield
    finally:
        plane.kubectl(*apply, str(CRDS))


async def accepted(world: World, manifest: Live) -> None:
    """Creates a service as soon as the API server uses the CRD that takes it.

    It takes a changed CRD up a moment after the change was stored; no event tells when.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await world.create(manifest)
            except ApiError as refusal:
                if refusal.status != 422:
                    raise
                await asyncio.sleep(0.2)
            else:
                return


@pytest.mark.parametrize("memory", ["1e999", "1e30", "1e999999999", "much", "-1Gi", "1025Ti"])
async def test_the_server_refuses_the_quantity_and_names_field_and_bound(
    world: World, memory: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        await world.create(service(resources={**RESOURCES, "memory": memory}))
    assert refusal.value.status == 422
    assert "spec.resources.memory" in refusal.value.message
    assert "at most 1Pi" in refusal.value.message


async def test_a_service_older_than_the_bound_is_stalled_and_the_others_are_served(
    world: World,
) -> None:
    with older_crd(world.plane):
        await accepted(world, service("old", resources={**RESOURCES, "memory": "1e999"}))
    operator = await world.operator(env={"FLEETKEEPER_CONTROL_ENABLED": "true"}).start().leads()
    await world.create(service("new"))
    await world.ready("new")
    await world.until(
        "old stalled", lambda: condition(world.fis("old"), "Stalled").get("reason") == "InvalidSpec"
    )
    assert "spec.resources.memory" in condition(world.fis("old"), "Stalled")["message"]
    await world.until(
        "new controlled", lambda: "breaker" in ((world.fis("new") or {}).get("status") or {})
    )
    assert await operator.metric("fleetkeeper_defects_total") in {None, 0.0}
