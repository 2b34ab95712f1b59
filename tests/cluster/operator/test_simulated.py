"""A fleet of simulated engines on a real API server: none of the model, of a GPU, or of a write at rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest_asyncio

from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, operator_world, service

MODEL = {
    "source": "hf://example/llama",
    "revision": "a" * 40,
    "tokenSecret": {"name": "no-such-secret"},
    "cache": {"claimName": "no-such-claim"},
}


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-simulated") as found:
        yield found


async def test_simulated_engines_become_ready_without_what_the_model_needs(world: World) -> None:
    """With a budget of no GPU, though the spec names one, and without its claim and Secret."""
    profiles = world.directory / "profiles.json"
    profiles.write_text(simulated_catalog().model_dump_json(by_alias=True, exclude_none=True))
    settings = {
        "FLEETKEEPER_PROFILES_FILE": str(profiles),
        "FLEETKEEPER_MAX_ACCELERATORS": "0",
    }
    operator = await world.operator().start(**settings).leads()
    await world.create(service(replicas=3, engine={"profile": "simulated"}, model=MODEL))
    await world.ready()
    await world.quiet()

    template = (world.get("Deployment", "chat") or {})["spec"]["template"]
    (engine,) = template["spec"]["containers"]
    assert {kind for volume in template["spec"]["volumes"] for kind in set(volume) - {"name"}} == {
        "configMap",
        "emptyDir",
    }
    assert set(engine["resources"]["requests"]) == {"cpu", "memory"}
    variables = {item["name"]: item.get("value", "") for item in engine["env"]}
    assert json.loads(variables["FLEETKEEPER_ENGINE"])["simulation"]["hardware"] == "h100-8b"
    assert "HF_TOKEN" not in variables
    assert template["metadata"]["labels"]["fleetkeeper.io/simulated"] == "true"
    assert (world.get("NetworkPolicy", "chat-fk-engine") or {})["spec"].get("egress", []) == []
    assert "Job" not in {kind for kind, _ in world.children()}
    status = (world.fis() or {})["status"]
    assert status["engine"]["simulated"] is True
    assert status["readyReplicas"] == 3
    assert status["effective"]["accelerators"] == 0

    await world.change(model={**MODEL, "revision": "b" * 40})
    await world.until(
        "the engines have the other model, without a download before",
        lambda: "b" * 40 in json.dumps(world.get("Deployment", "chat")),
    )
    await world.ready()
    await world.quiet()
    assert "Job" not in {kind for kind, _ in world.children()}
    mark = world.mark()
    await world.quiet(5.0)
    assert world.requests(mark) == []
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}
