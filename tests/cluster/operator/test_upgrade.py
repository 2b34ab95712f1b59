"""An upgrade of the operator, or of its settings, restarts nothing: not there and not back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest_asyncio

from fleetkeeper.reconcile.profiles import default_catalog
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operator_world import World, operator_world, service


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
