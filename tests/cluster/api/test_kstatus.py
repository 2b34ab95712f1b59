"""The status that Flux computes for a service, with Flux's own library (fluxcd/cli-utils)."""

from __future__ import annotations

import json
import secrets
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api.conditions import Reason
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.status.defect import plan_of_defect
from fleetkeeper.reconcile.types import Defect
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.plan_cluster import settle, step
from tests.support.plan_world import act, new_world, plan_of, with_spec
from tests.support.status_cases import REACHED, RECOVERS, RESTING, ROUTED, SUSPENDED, next_resource

CRDS = Path(__file__).parents[3] / "crds"


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
    """Replicas that the autoscaler adds or removes are no roll-out for Flux."""
    world = settle(with_spec(RESTING, scaling={"minReplicas": 1, "maxReplicas": 4}))
    seen = set()
    for wanted in (3, 2):
        world = replace(world, allocation=ReplicaAllocation(wanted, "QueueWaitAboveTarget", "more"))
        for _ in range(12):
            world = step(act(world, plan_of(world)), 10.0)
            seen.add(world.engine.desired_replicas)
            assert kstatus_of({**world.resource, "status": world.status})[0] == "Current"
    assert seen >= {2, 3}


def test_a_new_service_is_in_progress_before_anybody_writes_its_status(
    control_plane: ControlPlane,
) -> None:
    """The API server fills in a generation that is not observed yet."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    control_plane.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))
    name = f"kstatus-{secrets.token_hex(3)}"
    manifest = {**new_world().resource, "metadata": {"name": name, "namespace": "default"}}
    control_plane.kubectl("create", "-f", "-", input=json.dumps(manifest))
    created = json.loads(control_plane.kubectl("get", "fis", name, "-o", "json"))
    control_plane.kubectl("delete", "fis", name, "--wait=false")
    assert created["metadata"]["generation"] == 1
    assert kstatus_of(created)[0] == "InProgress"
    without = {key: value for key, value in created.items() if key != "status"}
    assert kstatus_of(without)[0] == "Current", "the default is what makes Flux wait"


def test_a_new_service_that_cannot_be_planned_is_in_progress() -> None:
    resource = new_world().resource
    plan = plan_of_defect(resource, Defect("decide", "KeyError"), 1.0)
    assert kstatus_of({**resource, "status": plan.status})[0] == "InProgress"
