"""The status that Flux computes for a service, with Flux's own library (fluxcd/cli-utils)."""

from __future__ import annotations

import json
import secrets
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.conditions import Reason
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.status.defect import plan_of_defect
from fleetkeeper.reconcile.types import Defect
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.guards import GUARD_S
from tests.support.plane.crds import install_crds
from tests.support.reconcile.plan_cluster import settle, step
from tests.support.reconcile.plan_world import act, new_world, plan_of, with_spec
from tests.support.reconcile.status_cases import (
    REACHED,
    RECOVERS,
    RESTING,
    ROUTED,
    SUSPENDED,
    next_resource,
)


def kstatus_of(*resources: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the status of each and its message; the program starts once."""
    done = subprocess.run(
        [str(program_path("kstatus"))],
        input=json.dumps(resources),
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stderr
    return [(found["status"], found["message"]) for found in json.loads(done.stdout)]


def statuses_of(*resources: dict[str, Any]) -> list[str]:
    """Return the status of each."""
    return [status for status, _ in kstatus_of(*resources)]


@pytest.fixture(scope="module")
def causes() -> dict[Reason, tuple[dict[str, Any], str, str]]:
    """For each cause the object, its status and its message."""
    resources = [next_resource(replace(world, children_written=None)) for world in REACHED.values()]
    found = zip(REACHED, resources, kstatus_of(*resources), strict=True)
    return {reason: (resource, *verdict) for reason, resource, verdict in found}


@pytest.mark.parametrize("reason", REACHED)
def test_each_cause_has_its_status_and_its_message(
    causes: dict[Reason, tuple[dict[str, Any], str, str]], reason: Reason
) -> None:
    """Flux stops at what needs somebody, waits for the rest, and shows the condition's message."""
    resource, status, message = causes[reason]
    waits = reason in RECOVERS | SUSPENDED
    assert status == ("InProgress" if waits else "Failed")
    assert message in {item["message"] for item in resource["status"]["conditions"]}


@pytest.mark.parametrize("world", [RESTING, ROUTED])
def test_a_service_at_rest_is_current_until_its_spec_changes(world: Any) -> None:
    """An old Ready never counts for a new generation."""
    resource = {**world.resource, "status": world.status}
    changed = with_spec(world, paused=True).resource | {"status": world.status}
    assert statuses_of(resource, changed) == ["Current", "InProgress"]


def test_a_starting_service_is_in_progress() -> None:
    world = step(act(new_world(), plan_of(new_world())), 1)
    resource = next_resource(replace(world, children_written=None))
    assert statuses_of(resource) == ["InProgress"]


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
    assert statuses_of({**world.resource, "status": world.status}) == [status]


def test_a_service_that_scales_stays_current() -> None:
    """Replicas that the autoscaler adds or removes are no roll-out for Flux."""
    world = settle(with_spec(RESTING, scaling={"minReplicas": 1, "maxReplicas": 4}))
    seen = set()
    resources = []
    for wanted in (3, 2):
        world = replace(world, allocation=ReplicaAllocation(wanted, "QueueWaitAboveTarget", "more"))
        for _ in range(12):
            world = step(act(world, plan_of(world)), 10.0)
            seen.add(world.engine.desired_replicas)
            resources.append({**world.resource, "status": world.status})
    assert seen >= {2, 3}
    assert set(statuses_of(*resources)) == {"Current"}


def test_a_new_service_is_in_progress_before_anybody_writes_its_status(
    control_plane: ControlPlane,
) -> None:
    """The API server fills in a generation that is not observed yet."""
    install_crds(control_plane)
    name = f"kstatus-{secrets.token_hex(3)}"
    manifest = {**new_world().resource, "metadata": {"name": name, "namespace": "default"}}
    control_plane.kubectl("create", "-f", "-", input=json.dumps(manifest))
    created = json.loads(control_plane.kubectl("get", "fis", name, "-o", "json"))
    control_plane.kubectl("delete", "fis", name, "--wait=false")
    assert created["metadata"]["generation"] == 1
    without = {key: value for key, value in created.items() if key != "status"}
    # The default of the status is what makes Flux wait.
    assert statuses_of(created, without) == ["InProgress", "Current"]


def test_a_new_service_that_cannot_be_planned_is_in_progress() -> None:
    resource = new_world().resource
    plan = plan_of_defect(resource, Defect("decide", "KeyError"), 1.0)
    assert statuses_of({**resource, "status": plan.status}) == ["InProgress"]
