"""An upgrade of the operator, or of its settings, restarts nothing: not there and not back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.earlier_router import IMAGE, give_vllm_router, router_of
from tests.support.operators.operator_world import World, operator_world, service


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-upgrade") as found:
        yield found


def _identities(world: World) -> dict[tuple[str, str], tuple[str, object]]:
    """UID and generation of every child, ReplicaSet and pod."""
    return {
        key: (live["metadata"]["uid"], live["metadata"].get("generation"))
        for key, live in world.objects.items()
        if key[0] != "InferenceService"
    }


async def test_a_newer_engine_profile_restarts_nothing_there_and_back(world: World) -> None:
    newer = world.directory / "profiles.json"
    catalog = json.loads(default_catalog().model_dump_json(by_alias=True, exclude_none=True))
    profile = next(p for p in catalog["profiles"] if p["name"] == catalog["aliases"]["cuda"])
    kind, version, number = profile["name"].rsplit("-", 2)
    later = {**profile, "name": f"{kind}-{version}-{int(number) + 1}"}
    catalog["profiles"].append(later)
    catalog["aliases"]["cuda"] = later["name"]
    newer.write_text(json.dumps(catalog))

    operator = await world.operator().start().leads()
    await world.create(service("chat", replicas=2))
    await world.create(service("routed", routing={"policy": "LeastLoaded"}))
    await world.ready("chat", "routed")
    await world.quiet(3.0)
    before = _identities(world)

    await operator.stop()
    await operator.start(FLEETKEEPER_PROFILES_FILE=str(newer)).leads()
    await world.until(
        "update reported",
        lambda: (world.fis() or {})["status"]["engine"].get("updateAvailable") == later["name"],
    )
    await world.quiet(3.0)
    assert _identities(world) == before

    await operator.stop()
    await operator.start().leads()
    await world.until(
        "update gone",
        lambda: "updateAvailable" not in (world.fis() or {})["status"]["engine"],
    )
    await world.quiet(3.0)
    assert _identities(world) == before


async def test_a_vllm_router_stays_until_its_next_rollout_and_its_account_until_its_last_pod(
    world: World,
) -> None:
    """An upgrade writes nothing to its Deployment, and a change of its template brings Envoy."""
    operator = await world.operator().start().leads()
    await world.create(service(routing={"policy": "LeastLoaded"}))
    await world.ready()
    await operator.stop()
    await give_vllm_router(world)
    before = router_of(world)

    await operator.start().leads()
    await world.until("its status", lambda: "router" not in (world.fis() or {})["status"])
    await world.quiet(3.0)
    assert router_of(world)["metadata"]["generation"] == before["metadata"]["generation"]
    await world.change(routing={"replicas": 3})
    await world.until("a third one", lambda: router_of(world)["spec"]["replicas"] == 3)
    assert router_of(world)["spec"]["template"] == before["spec"]["template"]
    await world.until("its pods", lambda: router_of(world)["status"].get("availableReplicas") == 3)

    await world.change(routing={"policy": "RoundRobin"})
    await world.until(
        "no account",
        lambda: not {"ServiceAccount", "RoleBinding"} & {k for k, _ in world.children()},
    )
    left = [
        pod["metadata"]["name"]
        for (kind, _), pod in world.objects.items()
        if kind == "Pod" and pod["spec"]["containers"][0]["image"] == IMAGE
    ]
    assert left == [], "the account went before its pods"
    await world.ready()
    assert router_of(world)["spec"]["template"]["spec"]["serviceAccountName"] == "default"
    gone = next(name for (kind, name) in world.objects if kind == "Pod" and "-fk-router-" in name)
    await world.delete(POD, gone)
    await world.until(
        "its replacement", lambda: ("Pod", gone) not in world.objects and _routers(world) == 3
    )
    await world.until("Envoy", lambda: (world.fis() or {})["status"].get("router") == "Envoy")
    await world.quiet(3.0)


def _routers(world: World) -> int:
    """How many router pods are ready."""
    return int(router_of(world)["status"].get("readyReplicas") or 0)
