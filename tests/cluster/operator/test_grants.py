"""What engines demand, on a real API server: grants.json comes, changes and goes, and no pod with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fleetkeeper.adapters.keys import new_grant_keys, rotated_grant_keys
from fleetkeeper_contract.grants import USAGE_POD_LABELS
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.autoscale.control_world import loopback_engines
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import Live, World, condition, operator_world, service

GRANT_KEYS = "fleetkeeper_grant_keys"


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-grants") as found:
        yield found


def pods_and_templates(world: World) -> dict[tuple[str, str], tuple[str, object]]:
    """UID and generation of what would restart an engine, or shows that it was restarted."""
    return {
        key: (live["metadata"]["uid"], live["metadata"].get("generation"))
        for key, live in world.objects.items()
        if key[0] in {"Deployment", "ReplicaSet", "Pod"}
    }


def grants(world: World) -> Live | None:
    """What the service's ConfigMap says about grants; None if it says nothing."""
    for (kind, _), live in world.children().items():
        if kind == "ConfigMap":
            text = live["data"].get("grants.json")
            found: Live | None = json.loads(text) if text else None
            return found
    return None


def usage_may_read(world: World) -> bool:
    """Whether an engine's NetworkPolicy lets the usage pod in."""
    return any(
        peer.get("podSelector", {}).get("matchLabels") == USAGE_POD_LABELS
        for (kind, _), live in world.children().items()
        if kind == "NetworkPolicy"
        for rule in live["spec"].get("ingress", ())
        for peer in rule["from"]
    )


def kids(jwks: str) -> list[str]:
    return [key["kid"] for key in json.loads(jwks)["keys"]]


def replace_file(file: Path, text: str) -> None:
    draft = file.with_name(".draft")
    draft.write_text(text)
    draft.replace(file)


async def test_access_changes_without_a_new_pod_and_settles_without_a_write(world: World) -> None:
    """First without a gateway, which closes the service and says so; then with one."""
    operator = world.operator(waits={"runtime.grant_keys.CHECK_PERIOD_S": 1.0})
    await operator.start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    await world.quiet()
    before = pods_and_templates(world)
    assert grants(world) is None
    assert not usage_may_read(world)
    assert await operator.metric(GRANT_KEYS) == 0

    await world.change(access="Gateway")
    await world.until("demanded", lambda: (grants(world) or {}).get("demanded") is True)
    found = grants(world)
    assert found == {
        "demanded": True,
        "service": (world.fis() or {})["metadata"]["uid"],
        "keys": [],
    }
    await world.until(
        "the reason", lambda: condition(world.fis(), "Degraded").get("reason") == "NoGrantKeys"
    )

    # An operator with the gateway's keys, as after an upgrade of the chart with gateway.enabled.
    keys = world.directory / "grant-jwks.json"
    files = new_grant_keys()
    replace_file(keys, files["jwks.json"])
    await operator.stop()
    await operator.start(FLEETKEEPER_GRANT_JWKS_FILE=str(keys)).leads()
    await world.until(
        "keys",
        lambda: [k["kid"] for k in (grants(world) or {})["keys"]] == kids(files["jwks.json"]),
    )
    await world.until(
        "as expected", lambda: condition(world.fis(), "Degraded").get("status") == "False"
    )
    await world.until("usage", lambda: usage_may_read(world))
    assert await operator.metric(GRANT_KEYS) == 1
    await world.quiet()
    mark = world.mark()
    await world.quiet()
    assert world.writes(mark) == []

    # A rotation reaches the ConfigMap without a restart of the operator; garbage does not.
    rotated = rotated_grant_keys(files, sign_from=2e9, now=1e9)
    replace_file(keys, rotated["jwks.json"])
    await world.until(
        "the next key",
        lambda: [k["kid"] for k in (grants(world) or {})["keys"]] == kids(rotated["jwks.json"]),
    )
    replace_file(keys, '{"keys": []}')
    await world.until("a warning", lambda: "grant keys kept" in operator.log.read_text())
    assert len((grants(world) or {})["keys"]) == 2
    assert await operator.metric(GRANT_KEYS) == 2

    await world.change(access="Open")
    await world.until("open", lambda: (grants(world) or {}).get("demanded") is False)
    await operator.stop()
    await operator.start().leads()
    await world.until("nothing said", lambda: grants(world) is None)
    await world.until("no usage", lambda: not usage_may_read(world))
    await world.ready()
    assert pods_and_templates(world) == before
    assert operator.tracebacks() == []


async def test_engines_that_demand_nothing_are_reported_until_they_do(
    control_plane: ControlPlane, world: World
) -> None:
    """Measured by Prometheus or directly: as an engine of an older image, which exports no demand."""
    keys = world.directory / "grant-jwks.json"
    replace_file(keys, new_grant_keys()["jwks.json"])
    async with loopback_engines(control_plane, world) as engines:
        names = ("old", "new")
        engines.rate_per_s = dict.fromkeys(names, 4.0)
        engines.demand_grants = {"new"}
        operator = engines.operator(waits={"autoscale.constants.OPEN_ENGINE_S": 5.0})
        await operator.start(FLEETKEEPER_GRANT_JWKS_FILE=str(keys)).leads()
        for name in names:
            scaling = {"mode": "Advisory", "minReplicas": 1, "maxReplicas": 1}
            await world.create(
                service(name, access="Gateway", placement=engines.placement, scaling=scaling)
            )
        await world.ready(*names)
        for name in names:
            await engines.grow(name, 1)

        def reason(name: str) -> object:
            return condition(world.fis(name), "Degraded").get("reason")

        await world.until("reported", lambda: reason("old") == "GrantsNotDemanded", GUARD_S)
        (pod,) = engines.pods("old")
        assert pod["metadata"]["name"] in condition(world.fis("old"), "Degraded")["message"]
        assert reason("new") == "AsExpected"
        assert await world.wait_for_event("old", "Warning", "without a grant")
        engines.demand_grants.add("old")
        await world.until("cleared", lambda: reason("old") == "AsExpected", GUARD_S)


async def test_an_access_that_nobody_knows_is_refused_by_the_api_server(world: World) -> None:
    with pytest.raises(ApiError, match=r"spec\.access") as refusal:
        await world.create(service(access="Closed"))
    assert refusal.value.status == 422
