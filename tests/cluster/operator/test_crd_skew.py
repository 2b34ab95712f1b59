"""A CRD that differs from the operator's: what runs stays as it is, and the status says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_process import PATIENCE_S
from tests.support.operators.operator_rights import CRDS
from tests.support.operators.operator_world import Live, World, condition, operator_world, service
from tests.support.operators.reason_checks import apply, reports


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-crd-skew") as found:
        yield found


async def test_a_spec_that_was_valid_yesterday_keeps_what_runs(world: World) -> None:
    """A schema without rules let it in; the operator reports the mistake and changes nothing."""
    await world.operator().start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    before = _uids(world)
    loose = desired_crd()
    schema = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _without_rules(schema)
    apply(world.plane, loose)
    try:
        await _scale_once_let_in(world, {"minReplicas": 5, "maxReplicas": 2})
        await reports(world, "chat", "Stalled", "True", "InvalidSpec", "spec.scaling")
        await reports(world, "chat", "Ready", "False", "InvalidSpec", "spec.scaling")
        assert condition(world.fis(), "Available")["status"] == "True"
        assert _uids(world) == before
        await world.change(scaling={"minReplicas": 1, "maxReplicas": 2})
        await world.ready()
        assert _uids(world) == before
    finally:
        world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))


async def _scale_once_let_in(world: World, scaling: Live) -> None:
    """The API server follows a changed CRD some moments later, without any event."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await world.change(scaling=scaling)
            except ApiError as refused:
                if refused.status != 422:
                    raise
                await asyncio.sleep(0.1)
            else:
                return


def _without_rules(schema: Any) -> None:
    """Takes every CEL rule out of a schema."""
    if isinstance(schema, dict):
        schema.pop("x-kubernetes-validations", None)
        for part in schema.values():
            _without_rules(part)
    elif isinstance(schema, list):
        for part in schema:
            _without_rules(part)


def _uids(world: World) -> set[str]:
    """Of all children and pods."""
    return {
        live["metadata"]["uid"]
        for (kind, _), live in world.objects.items()
        if kind != "InferenceService"
    }


async def test_an_older_crd_deletes_nothing_and_is_reported(world: World) -> None:
    """It lacks a field that the spec may hold: no child is written until the CRD is upgraded."""
    operator = world.operator(env={"FLEETKEEPER_RESYNC_S": "5"})
    await operator.start().leads()
    await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
    await world.ready()
    await world.quiet(1.0)
    before = _uids(world)
    older = desired_crd()
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["breaker"]
    _without_rules(older)  # some refer to the missing field
    apply(world.plane, older)
    try:
        words = ("spec.breaker", "Upgrade the CRDs")
        await reports(world, "chat", "Stalled", "True", "CRDTooOld", *words)
        operator.kill()
        await operator.start().leads()
        await reports(world, "chat", "Stalled", "True", "CRDTooOld", *words)
        assert condition(world.fis(), "Available")["status"] == "True"
        assert _uids(world) == before
    finally:
        world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    await world.until("no longer reported", lambda: not condition(world.fis(), "Stalled"))
    await world.ready()
    assert _uids(world) == before
