"""Percentages of a rollout: counted against the desired replicas, as a Deployment does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.types import Rollout
from fleetkeeper.reconcile.manifests.rollout import rollout_pods
from fleetkeeper.reconcile.types import Kind
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import Behaviour, World, new_world, plan_of, with_spec

OTHER = {"source": "pvc://models/other"}


@pytest.mark.parametrize(
    ("surge", "unavailable", "pods"),
    [
        # (surge, unavailable) for 0, 1, 2, 3, 4, 5, 8, 10, and 1000 desired replicas
        (1, 0, [(1, 0)] * 9),
        (0, 1, [(0, 1)] * 9),
        ("25%", 0, [(0, 1), (1, 0), (1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (3, 0), (250, 0)]),
        ("25%", "25%", [(0, 1), (1, 0), (1, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (250, 250)]),
        (0, "25%", [(0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 2), (0, 2), (0, 250)]),
        ("0%", "1%", [(0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 10)]),
        ("1%", "100%", [(0, 1), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 8), (1, 10), (10, 1000)]),
        ("100%", "0%", [(0, 1), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (8, 0), (10, 0), (1000, 0)]),
        ("29%", "29%", [(0, 1), (1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 2), (3, 2), (290, 290)]),
    ],
)  # fmt: skip
def test_surge_rounds_up_unavailable_down_and_two_zeros_leave_one_unavailable(
    surge: int | str, unavailable: int | str, pods: list[tuple[int, int]]
) -> None:
    """No floats: 29% of 100 is 29, not 28.999."""
    rules = Rollout(max_surge=surge, max_unavailable=unavailable)
    sizes = (0, 1, 2, 3, 4, 5, 8, 10, 1000)
    assert [rollout_pods(rules, size) for size in sizes] == pods


def good_world(replicas: int, **rollout: Any) -> World:
    return settle(
        new_world(
            routing={"policy": "None"},
            replicas=replicas,
            rollout={"startupSeconds": 600, **rollout},
        )
    )


@pytest.mark.parametrize(
    ("replicas", "unavailable", "lost", "is_ready"),
    [
        (10, "25%", 2, True),
        (10, "25%", 3, False),
        (3, "25%", 1, False),  # 0.75 rounds down
        (4, "25%", 1, True),
        (4, "100%", 3, True),
    ],
)
def test_ready_needs_the_replicas_that_the_percentage_leaves(
    replicas: int, unavailable: str, lost: int, *, is_ready: bool
) -> None:
    """Like `replicas - maxUnavailable`, in pods of the desired number."""
    world = good_world(replicas, maxUnavailable=unavailable)
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    down = {pod.uid for pod in world.pods[:lost]}
    pods = tuple(
        replace(pod, ready=False, ready_since=None, ejected_since=world.now)
        if pod.uid in down
        else pod
        for pod in world.pods
    )
    engine = replace(world.engine, ready_replicas=replicas - lost)
    world = replace(
        world,
        pods=pods,
        children={**world.children, (Kind.DEPLOYMENT, "chat"): engine},
    )
    plan = plan_of(world)
    conditions = {item["type"]: item for item in (plan.status or world.status)["conditions"]}
    assert (conditions["Ready"]["status"] == "True") is is_ready


def test_auto_replaces_a_surge_in_percent_that_found_no_accelerator() -> None:
    """The live Deployment then has no surge, which keeps Replace until the end of the rollout."""
    world = replace(good_world(2, maxSurge="25%"), gpus=2)
    world = live(with_spec(world, model=OTHER), 125)
    assert world.engine.max_surge == 0
    done = settle(world)
    assert done.condition("Ready") == ("True", "AllReplicasReady")
    assert done.engine.max_surge is None, "the next rollout surges again, in percent"


def test_a_surge_of_0_percent_is_no_surge_that_fails() -> None:
    """Replace asked for during it is obeyed at once, because no additional pod was created."""
    world = good_world(2, maxSurge="0%", maxUnavailable="50%")
    world = live(with_spec(replace(world, next_behaviour=Behaviour.BAD_OPTION), model=OTHER), 15)
    rules = {"startupSeconds": 600, "strategy": "Replace", "maxUnavailable": "50%"}
    assert live(with_spec(world, rollout=rules), 5).engine.max_surge == 0


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_a_number_of_replicas_that_changes_rewrites_no_percentage(replicas: int) -> None:
    """The Deployment controller counts it anew; only the number is written."""
    world = good_world(2, maxSurge="25%", maxUnavailable="10%")
    before = len(world.writes)
    world = settle(with_spec(world, replicas=replicas))
    assert [write for write in world.writes[before:] if write != "status"] == [
        "scale Deployment chat"
    ]
