"""The health that Argo CD computes from a status, with the Lua of docs/gitops.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from lupa import lua51

from fleetkeeper.api.conditions import Reason
from tests.support.docs_commands import ROOT
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import World, new_world, with_spec
from tests.support.reconcile.status_cases import (
    REACHED,
    RECOVERS,
    RESTING,
    ROUTED,
    SUSPENDED,
    next_resource,
)

KEY = "resource.customizations.health.fleetkeeper.io_InferenceService"


def script() -> str:
    """The Lua of the page: the YAML block that holds the key."""
    page = (ROOT / "docs" / "gitops.md").read_text()
    (block,) = [
        part.split("```")[0] for part in page.split("```yaml\n")[1:] if part.startswith(KEY)
    ]
    return str(yaml.safe_load(block)[KEY])


def health_of(resource: dict[str, Any]) -> tuple[str, str]:
    """Status and message, computed by Lua 5.1 as in Argo CD, which has no nil for absent fields."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    health: Any = lua.eval(f"function(obj) {script()} end")
    found = health(lua.table_from(json.loads(json.dumps(resource)), recursive=True))
    return found.status, found.message


@pytest.mark.parametrize("reason", REACHED)
def test_each_cause_has_its_health_and_its_message(reason: Reason) -> None:
    """What needs somebody is Degraded, what somebody wanted is Suspended; the text is the condition's."""
    resource = next_resource(REACHED[reason])
    status, message = health_of(resource)
    if reason in SUSPENDED:
        assert status == "Suspended"
    else:
        assert status == ("Progressing" if reason in RECOVERS else "Degraded")
    messages = {item["message"] for item in resource["status"].get("conditions", ())}
    assert message in messages or not messages


@pytest.mark.parametrize("world", [RESTING, ROUTED])
def test_a_service_at_rest_is_healthy_until_its_spec_changes(world: World) -> None:
    """A generation that nobody has seen yet is never reported with an old health."""
    resource = {**world.resource, "status": world.status}
    assert health_of(resource)[0] == "Healthy"
    assert health_of(with_spec(world, paused=True).resource | {"status": world.status}) == (
        "Progressing",
        "Fleetkeeper has not reconciled this generation yet.",
    )


def test_a_new_service_is_progressing() -> None:
    """It has no status yet."""
    assert health_of(new_world().resource)[0] == "Progressing"


@pytest.mark.parametrize("change", [{"paused": True}, {"suspend": True}, {"replicas": 0}])
def test_a_service_that_was_stopped_or_paused_is_suspended(change: dict[str, Any]) -> None:
    """Also once nothing is left to do."""
    world = settle(with_spec(RESTING, **change))
    assert health_of({**world.resource, "status": world.status})[0] == "Suspended"
