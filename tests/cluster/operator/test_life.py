"""A service's life under a real operator process on a real API server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operator_process import OperatorProcess
from tests.support.operator_world import World, condition, is_ready, operator_world, service

REST_S = 10.0


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-life") as found:
        yield found


@pytest_asyncio.fixture
async def operator(world: World) -> OperatorProcess:
    return await world.operator().start().leads()


@pytest.mark.parametrize(("policy", "children"), [("None", 5), ("LeastLoaded", 10)])
async def test_a_service_becomes_a_ready_fleet_in_few_writes(
    world: World, operator: OperatorProcess, policy: str, children: int
) -> None:
    mark = world.mark()
    await world.create(service(replicas=2, routing={"policy": policy}))
    await world.ready()
    await world.quiet()

    deployment = world.get("Deployment", "chat")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2
    kinds = {"Deployment", "Service", "PodDisruptionBudget", "ConfigMap", "NetworkPolicy"}
    routed = {"ServiceAccount", "RoleBinding"} if policy != "None" else set()
    assert {kind for kind, _ in world.children()} == kinds | routed
    for live in world.children().values():
        (owner,) = live["metadata"]["ownerReferences"]
        assert owner["uid"] == (world.fis() or {})["metadata"]["uid"]
        assert owner.get("blockOwnerDeletion", False) is False
        assert "finalizers" not in live["metadata"]
    writes = world.writes(mark)
    counted = Counter(f"{write.verb} {write.resource}" for write in writes)
    assert len(world.children()) == children
    assert sum(write.resource != "inferenceservices/status" for write in writes) == children, (
        counted
    )
    # Two of the status: when it is ready, and when its replicas count as available.
    assert len(writes) <= children + 2, counted
    assert all(write.namespace == world.namespace for write in writes)
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}
    assert "Created" in {event["reason"] for event in await world.wait_for_event("chat", "Normal")}


async def test_at_rest_nothing_is_read_or_written(world: World, operator: OperatorProcess) -> None:
    for number in range(5):
        await world.create(service(f"chat-{number}"))
    await world.ready(*(f"chat-{number}" for number in range(5)))
    await world.quiet()
    mark = world.mark()
    await asyncio.sleep(REST_S)
    assert world.requests(mark) == []
    assert operator.alive


async def test_a_deleted_deployment_comes_back(world: World, operator: OperatorProcess) -> None:
    await world.create(service())
    await world.ready()
    before = (world.get("Deployment", "chat") or {})["metadata"]["uid"]
    await world.delete(DEPLOYMENT, "chat")
    await world.until(
        "deployment back",
        lambda: (
            (world.get("Deployment", "chat") or {}).get("metadata", {}).get("uid", before) != before
        ),
        timeout_s=20,
    )
    await world.ready()


async def test_a_hand_edit_is_reverted_by_one_write(
    world: World, operator: OperatorProcess
) -> None:
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    await world.patch(DEPLOYMENT, "chat", {"spec": {"replicas": 3}})
    await world.until(
        "replicas reverted",
        lambda: (world.get("Deployment", "chat") or {})["spec"]["replicas"] == 1,
    )
    await world.ready()
    await world.quiet()
    writes = [write for write in world.writes(mark) if write.resource == "deployments"]
    # A write that carries a resourceVersion may be refused first: the Deployment was moving.
    assert [write.verb for write in writes if write.code == 200] == ["patch"]
    assert {write.code for write in writes} <= {200, 409}


async def test_fields_of_others_are_left_alone(world: World, operator: OperatorProcess) -> None:
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    await world.patch(DEPLOYMENT, "chat", {"metadata": {"annotations": {"team": "a"}}})
    await world.patch(
        CHILDREN[Kind.SERVICE], "chat", {"metadata": {"labels": {"cost-centre": "42"}}}
    )
    await world.patch(INFERENCE_SERVICE, "chat", {"metadata": {"annotations": {"note": "mine"}}})
    await world.quiet()
    assert world.writes(mark) == []
    await world.change(replicas=2)
    await world.until(
        "scaled", lambda: (world.get("Deployment", "chat") or {})["spec"]["replicas"] == 2
    )
    await world.ready()
    assert (world.get("Deployment", "chat") or {})["metadata"]["annotations"]["team"] == "a"
    assert (world.get("Service", "chat") or {})["metadata"]["labels"]["cost-centre"] == "42"


async def test_scaling_costs_one_write_and_at_most_two_statuses(
    world: World, operator: OperatorProcess
) -> None:
    """Up: the Deployment and a status. Down: a pod's deletion cost, the Deployment and a status.

    The second status comes when the new pods count as available, or the old one is gone.
    """
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    mark = world.mark()
    await world.change(replicas=3)
    await world.until("3 ready", lambda: (world.fis() or {})["status"].get("readyReplicas") == 3)
    await world.quiet()
    up = world.accepted_writes(mark)
    assert up["deployments"] == 1
    assert 1 <= up["inferenceservices/status"] <= 2
    assert up.total() == 1 + up["inferenceservices/status"]
    mark = world.mark()
    await world.change(replicas=2)
    await world.until("2 left", lambda: (world.fis() or {})["status"].get("replicas") == 2)
    await world.quiet()
    down = world.accepted_writes(mark)
    assert down["pods"] <= 1, "only where one pod is emptier than the others"
    assert down["deployments"] == 1
    assert 1 <= down["inferenceservices/status"] <= 2
    assert down.total() - down["pods"] == 1 + down["inferenceservices/status"]


async def test_a_restart_writes_nothing(world: World, operator: OperatorProcess) -> None:
    names = [f"chat-{number}" for number in range(5)]
    for name in names:
        await world.create(service(name))
    await world.ready(*names)
    await world.quiet()
    pods = {
        name: live["metadata"]["uid"]
        for (kind, name), live in world.objects.items()
        if kind == "Pod"
    }
    operator.kill()
    mark = world.mark()
    await operator.start().leads()
    await world.quiet(5.0)
    assert world.writes(mark, events=True) == []
    assert pods == {
        name: live["metadata"]["uid"]
        for (kind, name), live in world.objects.items()
        if kind == "Pod"
    }


async def test_a_change_made_while_it_was_dead_is_carried_out(
    world: World, operator: OperatorProcess
) -> None:
    await world.create(service(replicas=1))
    await world.ready()
    operator.kill()
    await world.change(replicas=2)
    operator.start()
    await world.until(
        "scaled", lambda: (world.get("Deployment", "chat") or {})["spec"]["replicas"] == 2
    )
    await world.ready()


async def test_a_deleted_service_leaves_nothing(world: World, operator: OperatorProcess) -> None:
    await world.create(service())
    await world.ready()
    await world.delete(INFERENCE_SERVICE, "chat")
    await world.until("all gone", lambda: not world.children() and world.fis() is None)
    mark = world.mark()
    await world.quiet(3.0)
    assert world.writes(mark) == []


async def test_a_service_goes_while_the_operator_is_down(
    world: World, operator: OperatorProcess
) -> None:
    await world.create(service())
    await world.ready()
    operator.kill()
    await world.delete(INFERENCE_SERVICE, "chat")
    await world.until("all gone", lambda: not world.children() and world.fis() is None)


async def test_a_foreign_object_under_a_childs_name_is_reported_and_not_touched(
    world: World, operator: OperatorProcess
) -> None:
    world.plane.kubectl(
        "-n", world.namespace, "create", "configmap", "chat-fk-control", "--from-literal=a=b"
    )
    await world.create(service())
    await world.until(
        "conflict reported",
        lambda: condition(world.fis(), "Stalled").get("reason") == "NameConflict",
    )
    found = world.get("ConfigMap", "chat-fk-control")
    assert found is not None
    assert found["data"] == {"a": "b"}
    assert "labels" not in found["metadata"]
    assert not is_ready(world.fis())
