"""A service's life under a real operator process on a real API server.

Two operators create all services of this file first; each test acts on its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE
from fleetkeeper.reconcile.status.build import WRITE_EVERY_S
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import STOCK, OperatorProcess
from tests.support.operators.operator_world import (
    World,
    condition,
    is_ready,
    operator_world,
    service,
)
from tests.support.plane.audit_log import Request

pytestmark = pytest.mark.asyncio(loop_scope="module")

REST_S: Final = 10.0
COUNTED: Final[dict[str, dict[str, Any]]] = {
    "plain": {"replicas": 2},
    "routed": {"replicas": 2, "routing": {"policy": "LeastLoaded"}},
    "scaled": {"replicas": 1},
    "other": {},
    "another": {},
}
"""Under the installed command with its usual waits: these count writes."""
CHANGED: Final = ("lost", "edited", "shared", "late", "gone", "left")


@dataclass
class Fleet:
    """Services at rest."""

    world: World
    operator: OperatorProcess
    written: list[Request]
    """What their creation cost."""


async def at_rest(
    world: World, operator: OperatorProcess, specs: dict[str, dict[str, Any]]
) -> Fleet:
    await operator.start().leads()
    for name, spec in specs.items():  # one by one: many starts at once need more statuses
        await world.create(service(name, **spec))
        await world.ready(name)
    await world.quiet()
    return Fleet(world, operator, world.writes())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def counted(control_plane: ControlPlane) -> AsyncIterator[Fleet]:
    async with operator_world(control_plane, "operator-life") as world:
        yield await at_rest(world, world.operator(command=STOCK), COUNTED)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def changed(control_plane: ControlPlane) -> AsyncIterator[Fleet]:
    async with operator_world(control_plane, "operator-change") as world:
        yield await at_rest(world, world.operator(), {name: {"replicas": 1} for name in CHANGED})


def replicas(world: World, name: str) -> int:
    return int((world.get("Deployment", name) or {})["spec"]["replicas"])


def pods(world: World) -> dict[str, str]:
    """The UIDs of the pods by name."""
    return {
        name: live["metadata"]["uid"]
        for (kind, name), live in world.objects.items()
        if kind == "Pod"
    }


@pytest.mark.parametrize(("name", "children"), [("plain", 5), ("routed", 9)])
async def test_a_service_becomes_a_ready_fleet_in_few_writes(
    counted: Fleet, name: str, children: int
) -> None:
    world = counted.world
    assert replicas(world, name) == 2
    kinds = {"Deployment", "Service", "PodDisruptionBudget", "ConfigMap", "NetworkPolicy"}
    assert {kind for kind, _ in world.children(name)} == kinds
    for live in world.children(name).values():
        (owner,) = live["metadata"]["ownerReferences"]
        assert owner["uid"] == (world.fis(name) or {})["metadata"]["uid"]
        assert owner.get("blockOwnerDeletion", False) is False
        assert "finalizers" not in live["metadata"]
    writes = [item for item in counted.written if item.name.startswith(name)]
    times = Counter(f"{write.verb} {write.resource}" for write in writes)
    assert len(world.children(name)) == children
    assert sum(write.resource != "inferenceservices/status" for write in writes) == children, times
    # Two of the status: when it is ready, and when its replicas count as available.
    assert len(writes) <= children + 2, times
    assert all(write.namespace == world.namespace for write in writes)
    assert await counted.operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}
    assert "Created" in {event["reason"] for event in await world.wait_for_event(name, "Normal")}


@pytest.mark.promise("settled-no-write")
async def test_at_rest_nothing_is_read_or_written(counted: Fleet) -> None:
    world = counted.world
    await world.quiet()
    mark = world.mark()
    await asyncio.sleep(REST_S)
    assert world.requests(mark) == []
    assert counted.operator.alive


async def test_scaling_costs_one_write_and_at_most_two_statuses(counted: Fleet) -> None:
    """Up: the Deployment and a status. Down: a pod's deletion cost, the Deployment and a status.

    The second status comes when the new pods count as available, or the old one is gone. A machine on
    which pods become ready one after the other for 10 s costs one more.
    """
    world = counted.world
    await world.quiet()

    def status() -> dict[str, Any]:
        found: dict[str, Any] = (world.fis("scaled") or {})["status"]
        return found

    mark = world.mark()
    began = time.monotonic()
    await world.change("scaled", replicas=3)
    await world.until("3 ready", lambda: status().get("readyReplicas") == 3)
    took_s = time.monotonic() - began
    await world.quiet()
    up = world.accepted_writes(mark)
    assert up["deployments"] == 1
    assert 1 <= up["inferenceservices/status"] <= 2 + took_s // WRITE_EVERY_S
    assert up.total() == 1 + up["inferenceservices/status"]
    mark = world.mark()
    await world.change("scaled", replicas=2)
    await world.until("2 left", lambda: status().get("replicas") == 2)
    await world.quiet()
    down = world.accepted_writes(mark)
    assert down["pods"] <= 1, "only where one pod is emptier than the others"
    assert down["deployments"] == 1
    assert 1 <= down["inferenceservices/status"] <= 2
    assert down.total() - down["pods"] == 1 + down["inferenceservices/status"]


@pytest.mark.promise("restart-writes-nothing")
async def test_a_restart_writes_nothing(counted: Fleet) -> None:
    world, operator = counted.world, counted.operator
    await world.quiet()
    before = pods(world)
    operator.kill()
    mark = world.mark()
    await operator.start().leads()
    await world.quiet(5.0)
    assert world.writes(mark, events=True) == []
    assert pods(world) == before


async def test_a_deleted_deployment_comes_back(changed: Fleet) -> None:
    world = changed.world
    before = (world.get("Deployment", "lost") or {})["metadata"]["uid"]
    await world.delete(DEPLOYMENT, "lost")

    def uid() -> str:
        return str((world.get("Deployment", "lost") or {}).get("metadata", {}).get("uid", before))

    await world.until("deployment back", lambda: uid() != before, GUARD_S)
    await world.ready("lost")


async def test_a_hand_edit_is_reverted_by_one_write(changed: Fleet) -> None:
    world = changed.world
    await world.quiet()
    mark = world.mark()
    await world.patch(DEPLOYMENT, "edited", {"spec": {"replicas": 3}})
    await world.until("replicas reverted", lambda: replicas(world, "edited") == 1)
    await world.ready("edited")
    await world.quiet()
    writes = [write for write in world.writes(mark) if write.resource == "deployments"]
    # A write that carries a resourceVersion may be refused first: the Deployment was moving.
    assert [write.verb for write in writes if write.code == 200] == ["patch"]
    assert {write.code for write in writes} <= {200, 409}


async def test_fields_of_others_are_left_alone(changed: Fleet) -> None:
    world = changed.world
    await world.quiet()
    mark = world.mark()
    annotated = {"metadata": {"annotations": {"team": "a"}}}
    for resource in (DEPLOYMENT, INFERENCE_SERVICE):
        await world.patch(resource, "shared", annotated)
    labelled = {"metadata": {"labels": {"cost-centre": "42"}}}
    await world.patch(CHILDREN[Kind.SERVICE], "shared", labelled)
    await world.quiet()
    assert world.writes(mark) == []
    await world.change("shared", replicas=2)
    await world.until("scaled", lambda: replicas(world, "shared") == 2)
    await world.ready("shared")
    assert (world.get("Deployment", "shared") or {})["metadata"]["annotations"]["team"] == "a"
    assert (world.get("Service", "shared") or {})["metadata"]["labels"]["cost-centre"] == "42"


async def test_a_change_made_while_it_was_dead_is_carried_out(changed: Fleet) -> None:
    world = changed.world
    changed.operator.kill()
    await world.change("late", replicas=2)
    await changed.operator.start().leads()
    await world.until("scaled", lambda: replicas(world, "late") == 2)
    await world.ready("late")


async def test_a_deleted_service_leaves_nothing(changed: Fleet) -> None:
    world = changed.world
    await world.quiet()
    await world.delete(INFERENCE_SERVICE, "gone")
    await world.until("all gone", lambda: not world.children("gone") and world.fis("gone") is None)
    mark = world.mark()
    await world.quiet(3.0)
    assert world.writes(mark) == []


async def test_a_service_goes_while_the_operator_is_down(changed: Fleet) -> None:
    world = changed.world
    changed.operator.kill()
    await world.delete(INFERENCE_SERVICE, "left")
    await world.until("all gone", lambda: not world.children("left") and world.fis("left") is None)
    await changed.operator.start().leads()


@pytest.mark.promise("foreign-objects")
async def test_a_foreign_object_under_a_childs_name_is_reported_and_not_touched(
    changed: Fleet,
) -> None:
    world = changed.world
    world.plane.kubectl(
        "-n", world.namespace, "create", "configmap", "taken-fk-control", "--from-literal=a=b"
    )
    await world.create(service("taken"))
    await world.until(
        "conflict reported",
        lambda: condition(world.fis("taken"), "Stalled").get("reason") == "NameConflict",
    )
    found = world.get("ConfigMap", "taken-fk-control")
    assert found is not None
    assert found["data"] == {"a": "b"}
    assert "labels" not in found["metadata"]
    assert not is_ready(world.fis("taken"))
