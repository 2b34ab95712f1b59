"""A CRD older than the operator: the API server prunes what it does not know, and no write repeats."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.reconcile.status.pruning import without_fields
from tests.support.reconcile.plan_world import World, act, plan_of
from tests.support.reconcile.status_cases import RESTING

MISSING = (
    "status.availableReplicas",
    "status.replicaStates",
    "status.replicaStates[].stage",
    "status.unlistedReplicas",
)


def pruned(world: World) -> World:
    """The world as an API server returns it whose CRD lacks these fields."""
    status = copy.deepcopy(world.status)
    for path in MISSING:
        status.pop(path.removeprefix("status."), None)
    return replace(world, resource={**world.resource, "status": status})


def test_a_field_that_an_older_crd_lacks_is_not_written_again_and_again() -> None:
    """One write says CRDTooOld; ten minutes later there is nothing to add."""
    world = pruned(replace(RESTING, crd_missing=MISSING))
    world = pruned(act(world, plan_of(world)))
    assert world.condition("Stalled") == ("True", "CRDTooOld")
    written = world.status_writes
    for _ in range(3):
        world = replace(world, now=world.now + 200.0)
        plan = plan_of(world)
        assert plan.status is None
        world = pruned(act(world, plan))
    assert world.status_writes == written


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        (("spec.breaker",), {"a": {"b": 1, "c": 2}, "rows": [{"x": 1, "y": 2}]}),
        (("status.a",), {"rows": [{"x": 1, "y": 2}]}),
        (("status.a.b",), {"a": {"c": 2}, "rows": [{"x": 1, "y": 2}]}),
        (("status.rows[].x", "status.gone"), {"a": {"b": 1, "c": 2}, "rows": [{"y": 2}]}),
        (("status.rows", "status.rows[].x"), {"a": {"b": 1, "c": 2}}),
    ],
)
def test_fields_are_left_out_at_their_path_alone(
    missing: tuple[str, ...], left: dict[str, Any]
) -> None:
    status = {"a": {"b": 1, "c": 2}, "rows": [{"x": 1, "y": 2}]}
    assert without_fields(status, missing) == left
    assert status == {"a": {"b": 1, "c": 2}, "rows": [{"x": 1, "y": 2}]}
