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
from tests.support.plan_world import (
    START,
    World,
    live,
    new_world,
    plan_of,
    settle,
)
from tests.support.status_cases import (
    REACHED,
    RESTING,
    ROUTED,
    told,
)


def test_a_time_moves_only_when_a_status_flips() -> None:
    """Another reason is not another time."""
    world = live(replace(new_world(routing={"policy": "None"}), gpus=0), 20)
    assert world.condition("Ready") == ("False", "InsufficientGPU")
    since = told(world, "Ready")["lastTransitionTime"]
    pulling = (Container("engine", waiting_reason="ErrImagePull"),)
    pods = tuple(replace(pod, scheduled=True, containers=pulling) for pod in world.pods)
    failing = replace(world, pods=pods, now=world.now + 100)
    assert told(failing, "Ready")["reason"] == Reason.IMAGE_PULL
    assert told(failing, "Ready")["lastTransitionTime"] == since
    ready = settle(replace(world, gpus=1))
    assert told(ready, "Ready")["lastTransitionTime"] > since


@pytest.mark.parametrize("seconds", [1, 59, 3_600, 86_400 * 30])
def test_no_clock_enters_the_status(seconds: int) -> None:
    """However much later the same world is looked at: nothing to write."""
    assert plan_of(replace(RESTING, now=RESTING.now + seconds)).is_empty
    assert plan_of(replace(ROUTED, now=ROUTED.now + seconds)).is_empty


@pytest.mark.parametrize("world", [*REACHED.values(), RESTING, ROUTED], ids=lambda _: "")
def test_every_status_fits_the_schema_of_the_crd(world: World) -> None:
    """What the API server would prune would be written for ever."""
    status = plan_of(world).status or world.status
    read = InferenceServiceStatus.model_validate_json(json.dumps(status))
    assert read.to_manifest() == status


def test_numbers_are_written_at_most_once_in_ten_seconds() -> None:
    """A ready replica more is a number; it can wait, and the plan says how long."""
    numbers = {**RESTING.status, "readyReplicas": 2}
    assert write_of(numbers, written=-4) == (None, 6.0)
    assert write_of(numbers, written=-10) == (numbers, None)
    assert write_of(numbers, written=None) == (numbers, None)


def write_of(
    desired: Manifest, *, written: float | None, children_written: float | None = None
) -> tuple[Manifest | None, float | None]:
    """What is decided at time 0 over the resting service's status."""
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


def test_a_movement_that_we_began_is_told_after_three_seconds_or_when_it_is_over() -> None:
    """One status tells a short movement; a long one is told while it lasts."""
    assert write_of(moving(), written=None, children_written=-1) == (None, 2.0)
    assert write_of(moving(), written=None, children_written=-3) == (moving(), None)
    over = {**RESTING.status, "replicas": 2}
    assert write_of(over, written=None, children_written=-1) == (over, None)


def test_a_first_router_that_comes_after_the_engines_is_part_of_the_start() -> None:
    """The engines are complete, so nothing progresses; the router follows, and one status tells it."""
    waits = [
        {**item, "status": "False", "reason": "NoReadyRouter"}
        if item["type"] in {"Available", "Ready"}
        else item
        for item in RESTING.status["conditions"]
    ]
    status = {**RESTING.status, "conditions": waits}
    assert write_of(status, written=None, children_written=-1) == (None, 2.0)
    assert write_of(status, written=None, children_written=None) == (status, None)


def test_what_later_looks_rest_on_never_waits_for_a_movement() -> None:
    """A crash in these three seconds would restart the engines on the profile before."""
    changed = moving(engine={**RESTING.status["engine"], "profile": "cuda-0.33.0-1"})
    assert write_of(changed, written=None, children_written=-1) == (changed, None)


def test_trouble_never_waits_for_a_movement() -> None:
    """Stalled and Degraded are told in the look that finds them."""
    world = REACHED[Reason.ADMISSION_DENIED]
    assert plan_of(replace(world, children_written=world.now)).status is not None


def test_a_condition_that_changes_is_written_at_once() -> None:
    """What people and tools wait for does not wait."""
    world = replace(RESTING, status_written=RESTING.now, pods=())
    status = plan_of(world).status
    assert status is not None
    assert told(world, "Ready")["status"] == "False"


def test_content_that_is_equal_is_not_written() -> None:
    """The status in place is the status wanted."""
    assert write_of(RESTING.status, written=None) == (None, None)


def test_a_resource_without_metadata_or_status_is_told_and_never_breaks() -> None:
    """Whatever a store returns: a plan, no exception."""
    resources: tuple[Manifest, ...] = (
        {},
        {"metadata": {"name": "chat"}},
        {"metadata": {}, "spec": None, "status": None},
    )
    for resource in resources:
        plan = decide_plan(Snapshot(resource=resource), RESTING.context, START)
        assert plan.status is not None
        assert not plan.actions
