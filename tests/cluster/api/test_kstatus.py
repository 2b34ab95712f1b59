"""The status that Flux computes for a service, with Flux's own library (fluxcd/cli-utils)."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.conditions import Reason
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.plan_cluster import settle, step
from tests.support.plan_world import act, new_world, plan_of, with_spec
from tests.support.status_cases import REACHED, RECOVERS, RESTING, ROUTED, SUSPENDED, next_resource


def kstatus_of(resource: dict[str, Any]) -> tuple[str, str]:
    """Return the status and its message."""
    done = subprocess.run(
        [str(program_path("kstatus"))],
        input=json.dumps([resource]),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return found["status"], found["message"]


@pytest.mark.parametrize("reason", REACHED)
def test_each_cause_has_its_status_and_its_message(reason: Reason) -> None:
    """Flux stops at what needs somebody, waits for the rest, and shows the condition's message."""
    resource = next_resource(replace(REACHED[reason], children_written=None))
    status, message = kstatus_of(resource)
    waits = reason in RECOVERS | SUSPENDED
    assert status == ("InProgress" if waits else "Failed")
    assert message in {item["message"] for item in resource["status"]["conditions"]}


@pytest.mark.parametrize("world", [RESTING, ROUTED])
def test_a_service_at_rest_is_current_until_its_spec_changes(world: Any) -> None:
    """An old Ready never counts for a new generation."""
    resource = {**world.resource, "status": world.status}
    assert kstatus_of(resource)[0] == "Current"
    changed = with_spec(world, paused=True).resource | {"status": world.status}
    assert kstatus_of(changed)[0] == "InProgress"


def test_a_starting_service_is_in_progress() -> None:
    world = step(act(new_world(), plan_of(new_world())), 1)
    resource = next_resource(replace(world, children_written=None))
    assert kstatus_of(resource)[0] == "InProgress"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"paused": True}, "Current"),
        ({"suspend": True}, "InProgress"),
        ({"replicas": 0}, "InProgress"),
    ],
)
def test_a_paused_service_at_rest_is_current_and_a_stopped_one_is_not(
    change: dict[str, Any], status: str
) -> None:
    """A paused service still answers requests; a stopped one does not, so its Ready is False."""
    world = settle(with_spec(RESTING, **change))
    assert kstatus_of({**world.resource, "status": world.status})[0] == status


def test_a_service_that_scales_stays_current() -> None:
    """A change of replicas by the autoscaler is no roll-out for Flux."""
    world = with_spec(RESTING, scaling={"minReplicas": 1, "maxReplicas": 4})
    world = settle(world)
    resource = {**world.resource, "status": world.status}
    assert kstatus_of(resource)[0] == "Current"
