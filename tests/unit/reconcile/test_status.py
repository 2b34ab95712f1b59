"""The status is written only when its content changes, and always fits the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.conditions import (
    Reason,
)
from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.common.values import (
    Manifest,
)
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.status.build import decide_status_write
from fleetkeeper.reconcile.types import (
    Container,
    Snapshot,
)
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import (
    START,
    World,
    new_world,
    plan_of,
)
from tests.support.reconcile.status_cases import (
    REACHED,
    RESTING,
    ROUTED,
    condition_of,
)


def test_a_time_moves_only_when_a_status_flips() -> None:
    """Another reason is not another time."""
    world = live(replace(new_world(routing={"policy": "None"}), gpus=0), 20)
    assert world.condition("Ready") == ("False", "InsufficientGPU")
    since = condition_of(world, "Ready")["lastTransitionTime"]
    pulling = (Container("engine", waiting_reason="ErrImagePull"),)
    pods = tuple(replace(pod, scheduled=True, containers=pulling) for pod in world.pods)
    failing = replace(world, pods=pods, now=world.now + 100)
    assert condition_of(failing, "Ready")["reason"] == Reason.IMAGE_PULL
    assert condition_of(failing, "Ready")["lastTransitionTime"] == since
    ready = settle(replace(world, gpus=1))
    assert condition_of(ready, "Ready")["lastTransitionTime"] > since


@pytest.mark.parametrize("seconds", [1, 59, 3_600, 86_400 * 30])
def test_the_status_does_not_depend_on_the_time(seconds: int) -> None:
    """The same world at any later time: nothing to write."""
    assert plan_of(replace(RESTING, now=RESTING.now + seconds)).is_empty
    assert plan_of(replace(ROUTED, now=ROUTED.now + seconds)).is_empty


@pytest.mark.parametrize("world", [*REACHED.values(), RESTING, ROUTED], ids=lambda _: "")
def test_every_status_fits_the_schema_of_the_crd(world: World) -> None:
    """Fields that the API server prunes would be written again and again."""
    status = plan_of(world).status or world.status
    read = InferenceServiceStatus.model_validate_json(json.dumps(status))
    assert read.to_manifest() == status


def test_numbers_are_written_at_most_once_in_ten_seconds() -> None:
    """One more ready replica is a number: it can wait, and the plan has the time."""
    numbers = {**RESTING.status, "readyReplicas": 2}
    assert write_of(numbers, written=-4) == (None, 6.0)
    assert write_of(numbers, written=-10) == (numbers, None)
    assert write_of(numbers, written=None) == (numbers, None)


def write_of(
    desired: Manifest, *, written: float | None, children_written: float | None = None
) -> tuple[Manifest | None, float | None]:
    """The decision at time 0 over the resting service's status."""
    return decide_status_write(
        desired, RESTING.status, written=written, children_written=children_written, now=0.0
    )


def moving(**parts: Any) -> Manifest:
    """The resting service's status, with Progressing=True."""
    conditions = [
        {**item, "status": "True", "reason": "ScalingUp"} if item["type"] == "Progressing" else item
        for item in RESTING.status["conditions"]
    ]
    return {**RESTING.status, "conditions": conditions, **parts}


def test_progress_after_an_own_write_is_reported_after_three_seconds_or_when_it_is_over() -> None:
    """Short progress needs one status; long progress is reported while it lasts."""
    assert write_of(moving(), written=None, children_written=-1) == (None, 2.0)
    assert write_of(moving(), written=None, children_written=-3) == (moving(), None)
    over = {**RESTING.status, "replicas": 2}
    assert write_of(over, written=None, children_written=-1) == (over, None)


def test_a_first_router_that_comes_after_the_engines_is_part_of_the_start() -> None:
    """The engines are complete, so nothing progresses; the router follows, and one status reports both."""
    waits = [
        {**item, "status": "False", "reason": "NoReadyRouter"}
        if item["type"] in {"Available", "Ready"}
        else item
        for item in RESTING.status["conditions"]
    ]
    status = {**RESTING.status, "conditions": waits}
    assert write_of(status, written=None, children_written=-1) == (None, 2.0)
    assert write_of(status, written=None, children_written=None) == (status, None)


def test_the_inputs_of_later_reconciles_are_written_at_once() -> None:
    """A crash in these three seconds would restart the engines on the profile before."""
    changed = moving(engine={**RESTING.status["engine"], "profile": "cuda-0.33.0-1"})
    assert write_of(changed, written=None, children_written=-1) == (changed, None)


def test_problems_are_written_at_once() -> None:
    """Stalled and Degraded are written in the reconcile that finds them."""
    world = REACHED[Reason.ADMISSION_DENIED]
    assert plan_of(replace(world, children_written=world.now)).status is not None


def test_a_condition_that_changes_is_written_at_once() -> None:
    """Users and tools wait for conditions."""
    world = replace(RESTING, status_written=RESTING.now, pods=())
    status = plan_of(world).status
    assert status is not None
    assert condition_of(world, "Ready")["status"] == "False"


def test_content_that_is_equal_is_not_written() -> None:
    """The status in place is the status wanted."""
    assert write_of(RESTING.status, written=None) == (None, None)


def test_a_resource_without_metadata_or_status_has_a_plan() -> None:
    """Any object leads to a plan, never to an exception."""
    resources: tuple[Manifest, ...] = (
        {},
        {"metadata": {"name": "chat"}},
        {"metadata": {}, "spec": None, "status": None},
    )
    for resource in resources:
        plan = decide_plan(Snapshot(resource=resource), RESTING.context, START)
        assert plan.status is not None
        assert not plan.actions
