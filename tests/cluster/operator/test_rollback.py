"""A roll-out that cannot start returns to the last good template, on a real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import World, condition, operator_world, service

GOOD_AFTER_S = 5.0
"""Of this operator; a minute otherwise."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-rollback") as found:
        yield found


def pods(world: World) -> dict[str, str]:
    """UIDs of the pods by name."""
    return {
        name: live["metadata"]["uid"]
        for (kind, name), live in world.objects.items()
        if kind == "Pod"
    }


def ready_for_s(world: World) -> float:
    """How long the service has been ready, by this machine's clock."""
    since = condition(world.fis(), "Ready")["lastTransitionTime"]
    return (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()


def template_hash(world: World) -> str:
    """Our annotation on the live template."""
    live = world.get("Deployment", "chat") or {}
    annotations = live["spec"]["template"]["metadata"]["annotations"]
    return str(annotations["fleetkeeper.io/template-hash"])


@pytest.mark.exhaustive
async def test_a_revision_that_no_node_fits_is_rolled_back_and_stays_at_rest(world: World) -> None:
    """The old ReplicaSet and its pods serve on; neither time nor a restart writes anything more."""
    waits = {"reconcile.last_good.GOOD_AFTER_S": GOOD_AFTER_S}
    operator: OperatorProcess = world.operator(waits=waits)
    await operator.start().leads()
    await world.create(service(replicas=1, rollout={"startupSeconds": 60}))
    await world.ready()
    await world.until(
        "ready for long enough", lambda: ready_for_s(world) > GOOD_AFTER_S + 2, GUARD_S
    )
    good, before = template_hash(world), pods(world)
    await world.change(placement={"nodeSelector": {"no": "such-node"}})
    await world.until(
        "rolled back",
        lambda: (
            condition(world.fis(), "Stalled").get("reason") == "RolledBack"
            and template_hash(world) == good
        ),
        GUARD_S,
    )
    await world.until("the bad pod is gone", lambda: pods(world) == before)
    await world.quiet(12.0)
    assert (world.fis() or {})["status"]["rollback"]["reason"] == "Unschedulable"
    assert len([key for key in world.objects if key[0] == "ReplicaSet"]) == 2
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}

    operator.kill()
    mark = world.mark()
    await operator.start().leads()
    await world.quiet(5.0)
    assert world.writes(mark, events=True) == []
    assert pods(world) == before
