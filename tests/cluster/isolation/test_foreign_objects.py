"""Objects that somebody else made with our labels trouble nobody but the service they name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, REPLICA_SET
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.bounds import ANSWER_BYTES
from fleetkeeper_kube.errors import NotTaken
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, condition, operator_world, service

Live = dict[str, Any]
CONFIG_MAP = CHILDREN[Kind.CONFIG_MAP]
OURS = {"app.kubernetes.io/managed-by": "fleetkeeper", "fleetkeeper.io/service": "chat"}


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "foreign-objects") as found:
        yield found


def replicaset(name: str, revision: str) -> Live:
    """A ReplicaSet without pods, as anybody with edit rights can make one."""
    labels = {**OURS, "app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"deployment.kubernetes.io/revision": revision},
        },
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "c", "image": "example.invalid/c:1"}]},
            },
        },
    }


def replicas(world: World, name: str) -> int | None:
    """The replicas that the engine Deployment of a service asks for."""
    live = world.get("Deployment", name)
    return None if live is None else live["spec"]["replicas"]


REVISIONS = {"superscript": "²", "digits": "9" * 5000}


async def create_replicasets(world: World, prefix: str) -> None:
    """Create a ReplicaSet with each hostile revision."""
    for name, revision in REVISIONS.items():
        await world.client.request(
            "POST", REPLICA_SET.path(world.namespace), body=replicaset(f"{prefix}-{name}", revision)
        )


async def test_replicasets_with_hostile_revisions_stop_no_start(world: World) -> None:
    """They are there when the operator starts, and others come while it runs."""
    await create_replicasets(world, "hostile")
    operator = await world.operator().start().leads()
    for name in ("chat", "other"):
        await world.create(service(name, replicas=1))
    await world.ready("chat", "other")
    await create_replicasets(world, "later")
    for name in ("chat", "other"):
        await world.change(name, replicas=2)
    await world.ready("chat", "other")
    assert [replicas(world, name) for name in ("chat", "other")] == [2, 2]
    assert operator.alive
    assert "Traceback" not in operator.log.read_text()


async def test_a_service_with_an_object_too_large_to_read_is_held_and_others_are_served(
    world: World,
) -> None:
    """Told by name, held also after a restart, and let go as soon as the object is gone."""
    operator = await world.operator().start().leads()
    for name in ("chat", "other"):
        await world.create(service(name, replicas=1))
    await world.ready("chat", "other")
    # 700 KB as it is sent; the API server writes each of these characters as six.
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "huge", "labels": OURS},
        "data": {"x": "<" * (ANSWER_BYTES // 3)},
    }
    with pytest.raises(NotTaken):  # the answer to a test's client is as large
        await world.client.request("POST", CONFIG_MAP.path(world.namespace), body=body)
    await world.until(
        "held", lambda: condition(world.fis(), "Stalled").get("reason") == "UnreadableObject"
    )
    told = condition(world.fis(), "Stalled")["message"]
    assert "ConfigMap huge" in told
    assert await operator.metric("fleetkeeper_unreadable_objects") == 1.0

    await operator.stop()
    await world.change("chat", replicas=3)
    await world.change("other", replicas=2)
    await world.delete(DEPLOYMENT, "other")
    await operator.start().leads()
    await world.ready("other")
    assert [replicas(world, name) for name in ("chat", "other")] == [1, 2]
    assert condition(world.fis(), "Stalled")["reason"] == "UnreadableObject"

    world.plane.kubectl("-n", world.namespace, "delete", "configmap", "huge")
    await world.ready("chat")
    assert replicas(world, "chat") == 3
    assert operator.alive
    assert "Traceback" not in operator.log.read_text()


DEEP = '{"f:a":' * 2000 + "{}" + "}" * 2000
"""The API server takes managedFields of this depth from anybody; Python decodes half of it."""


def create_deep(world: World, space: str, body: Live) -> None:
    """Creates an object with managedFields that Python cannot decode."""
    entry = {
        "manager": "m",
        "operation": "Update",
        "apiVersion": body["apiVersion"],
        "fieldsType": "FieldsV1",
        "fieldsV1": "DEEP",
    }
    text = json.dumps({**body, "metadata": {**body["metadata"], "managedFields": [entry]}})
    world.plane.kubectl("-n", space, "create", "-f", "-", input=text.replace('"DEEP"', DEEP))


async def test_objects_that_cannot_be_decoded_stop_neither_a_start_nor_a_watch(
    world: World,
) -> None:
    """A child and a service of a tenant, there at the start, and one more that comes later."""
    space = f"{world.namespace}-tenant"
    world.plane.kubectl("create", "namespace", space)
    try:
        metadata = {"name": "deep", "labels": OURS}
        create_deep(world, space, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
        create_deep(world, space, service("deep", paused=True))
        spaces = json.dumps([world.namespace, space])
        with world.cluster_rights():
            operator = world.operator(env={"FLEETKEEPER_NAMESPACES": spaces}).start()
            await operator.leads()
            assert await operator.metric("fleetkeeper_unreadable_objects") == 2.0
            await world.create(service(replicas=1))
            await world.ready()
            create_deep(world, space, service("later", paused=True))
            await world.change(replicas=2)
            await world.ready()
            async with asyncio.timeout(GUARD_S):
                while await operator.metric("fleetkeeper_unreadable_objects") != 3.0:
                    assert operator.alive, operator.log.read_text()[-3000:]
                    await asyncio.sleep(0.2)
        assert "Traceback" not in operator.log.read_text()
    finally:
        world.plane.kubectl("delete", "namespace", space, "--wait=false")
