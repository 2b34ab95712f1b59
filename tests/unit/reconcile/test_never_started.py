"""A new service that may sleep starts once if there is room. Else it sleeps, and a request starts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.common.budget import Allowance
from fleetkeeper.common.sleep import Sleep, Wake, parse_sleep
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.last_good import GOOD_AFTER_S
from fleetkeeper.reconcile.strategy import REPLACE_AFTER_S
from fleetkeeper.reconcile.types import Kind, ObjectCondition
from fleetkeeper_contract.sleep import SleepState, WakeMark
from fleetkeeper_contract.tiers import Tier
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    edited,
    new_world,
    plan_of,
    with_spec,
)

SLEEPS = {"scaling": {"sleep": {"minAwakeSeconds": 60}}, "access": "Gateway"}
NO_BUDGET = Allowance(0, "the fleet's budget of 4 GPUs")
FULL = {"gpus": 0}
SELECTOR = (
    "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector. preemption: none"
)
QUOTA = 'pods "chat-x" is forbidden: exceeded quota: gpus, requested: 1, used: 4, limited: 4'


def new(world: dict[str, Any] | None = None, **spec: Any) -> World:
    """Return a new service that may sleep, whose gateway can wake it."""
    context = replace(default_context(), grant_keys='{"keys":[{"kty":"OKP"}]}')
    given = {key: value for key, value in {**SLEEPS, **spec}.items() if value is not None}
    made = new_world(**given)
    return replace(made, **{"context": context, "wake": Wake(can_wake=True), **(world or {})})


def never_started(**spec: Any) -> World:
    """Return a new service for which there was no room, at rest."""
    world = settle(new(FULL, **spec))
    assert sleep_of(world).never_started
    return world


def woken(world: World, tier: Tier = Tier.STANDARD) -> World:
    """Return the world in which a request waits for the service."""
    return replace(world, wake=Wake(can_wake=True, mark=WakeMark(sleep_of(world).number, tier)))


def sleep_of(world: World) -> Sleep:
    return parse_sleep(world.status)


def events_of(world: World, seconds: float) -> list[tuple[str, str]]:
    """Return type and reason of the events that are recorded in this time."""
    found, end = [], world.now + seconds
    while world.now < end:
        plan = plan_of(world)
        found += [(event.type, event.reason) for event in plan.events]
        world = step(act(world, plan), 5.0)
    return found


@pytest.mark.parametrize("world", [FULL, {"allowance": NO_BUDGET}], ids=["nodes", "budget"])
def test_without_room_it_sleeps_and_waits_for_a_request(world: dict[str, Any]) -> None:
    """It holds no pod that would get the next free accelerator before services with requests."""
    found = settle(new(world, resources={"accelerator": {"count": 1}}))
    sleep = sleep_of(found)
    assert (sleep.state, sleep.number, sleep.failures) == (SleepState.ASLEEP, 1, 0)
    assert found.pods == ()
    assert found.engine.desired_replicas == 0
    assert "lastGood" not in found.status
    assert plan_of(found).is_empty
    assert plan_of(found).requeue_after_s is None


def test_it_is_as_specified_and_says_that_no_start_proved_it() -> None:
    """GitOps tools stay green: the spec asks for no replica without requests, and there is nothing to repair."""
    world = never_started()
    assert world.condition("Ready") == ("True", "NeverStarted")
    assert world.condition("Available") == ("False", "NeverStarted")
    assert world.condition("Progressing") == ("False", "NeverStarted")
    assert world.condition("ScalingLimited") == ("False", "NeverStarted")
    assert world.condition("Reconciling") is None
    assert world.condition("Stalled") is None
    (ready,) = [item for item in world.status["conditions"] if item["type"] == "Ready"]
    assert ready["message"] == sleep_of(world).message
    assert "InsufficientGPU: " in ready["message"]


def test_it_waits_for_a_moment_without_a_write_per_second() -> None:
    """An accelerator may become free. One requeue ends the wait, because time causes no event."""
    world = live(new(FULL), 15.0)
    since = world.pods[0].created
    early = replace(world, now=since + REPLACE_AFTER_S - 7)
    early = act(early, plan_of(early))
    plan = plan_of(early)
    assert plan.status is None
    assert plan.requeue_after_s == pytest.approx(7)
    plan = plan_of(replace(early, now=since + REPLACE_AFTER_S))
    assert plan.actions == (), "the status comes before the pods"
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Asleep"
    assert plan.status["sleep"]["neverStarted"] is True


def test_room_within_that_time_starts_it() -> None:
    world = settle(replace(live(new(FULL), REPLACE_AFTER_S - 20), gpus=1))
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert "sleep" not in world.status


def test_a_part_of_its_replicas_is_a_start() -> None:
    """Room for one of two: the service answers, and the other one waits like any other."""
    two = {**SLEEPS, "scaling": {"minReplicas": 2, "sleep": {}}}
    world = live(new({"gpus": 1}, **two), 3 * REPLACE_AFTER_S)
    assert sleep_of(world).state is None
    assert world.ready == 1


def test_it_is_recorded_once_and_is_no_warning() -> None:
    found = events_of(new({"allowance": NO_BUDGET}, resources={"accelerator": {"count": 1}}), 600)
    assert found == [("Normal", "Created"), ("Normal", "NeverStarted")]
    found = events_of(new(FULL), 600)
    assert found.count(("Normal", "NeverStarted")) == 1
    assert ("Normal", "Ready") not in found
    assert ("Normal", "Asleep") not in found


@pytest.mark.parametrize("tier", Tier)
def test_a_request_starts_it_like_any_sleeper(tier: Tier) -> None:
    """The first success makes it an ordinary service."""
    world = woken(replace(never_started(), gpus=1), tier)
    plan = plan_of(world)
    assert plan.status is not None
    assert (plan.status["sleep"]["state"], plan.status["sleep"]["tier"]) == ("Waking", tier.label)
    world = live(world, 5.0, 1.0)
    assert world.condition("Ready") == ("True", "Waking")
    world = settle(world)
    assert sleep_of(world).state is None
    assert not sleep_of(world).never_started
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert len(sleep_of(world).start_seconds) == 1


def test_a_start_that_fails_is_a_failed_wake() -> None:
    world = replace(never_started(), gpus=1)
    broken = {world.engine.template_hash: Behaviour.BAD_OPTION}
    world = settle(woken(replace(world, behaviours=broken)))
    sleep = sleep_of(world)
    assert (sleep.state, sleep.number, sleep.failures) == (SleepState.ASLEEP, 2, 1)
    assert "BadEngineOption" in sleep.message
    assert world.condition("Ready") == ("False", "WakeFailed")
    world = settle(with_spec(world, model={"source": "pvc://models/other"}))
    assert world.condition("Ready") == ("True", "NeverStarted"), "the changed spec is unproven too"


def test_a_changed_spec_is_tried_with_the_next_request_and_keeps_the_cause() -> None:
    world = never_started()
    message = sleep_of(world).message
    world = settle(with_spec(replace(world, gpus=1), model={"source": "pvc://models/other"}))
    assert (sleep_of(world).state, sleep_of(world).message) == (SleepState.ASLEEP, message)
    assert world.condition("Ready") == ("True", "NeverStarted")
    assert sleep_of(settle(woken(world))).state is None


def test_its_template_is_good_only_after_a_minute_of_a_ready_pod() -> None:
    """Ready was True all the time, which proves nothing while there was no pod."""
    world = replace(never_started(), now=never_started().now + 3600)
    assert plan_of(world).is_empty
    world = live(woken(replace(world, gpus=1)), 15.0)
    assert world.ready == 1
    assert sleep_of(world).state is None
    since = min(pod.ready_since or 0.0 for pod in world.pods)
    changed = with_spec(world, model={"source": "pvc://models/other"})
    early = replace(changed, now=since + GOOD_AFTER_S - 10)
    assert "lastGood" not in act(early, plan_of(early)).status
    late = replace(changed, now=since + GOOD_AFTER_S + 10)
    assert "lastGood" in act(late, plan_of(late)).status


def test_a_service_whose_gateway_cannot_wake_it_waits_like_any_other() -> None:
    world = live(new({**FULL, "wake": Wake()}), 2 * REPLACE_AFTER_S)
    assert world.condition("Ready") == ("False", "InsufficientGPU")
    assert len([pod for pod in world.pods if pod.component == "engine"]) == 1
    world = settle(replace(world, wake=Wake(can_wake=True)))
    assert world.condition("Ready") == ("True", "NeverStarted")


@pytest.mark.parametrize(
    "spec",
    [{"scaling": None}, {"access": "Open"}, {"replicas": 1}],
    ids=["no sleep", "open", "pinned"],
)
def test_a_service_that_never_sleeps_waits_like_any_other(spec: dict[str, Any]) -> None:
    world = live(new(FULL, **spec), 2 * REPLACE_AFTER_S)
    assert world.condition("Ready") == ("False", "InsufficientGPU")
    assert world.engine.desired_replicas == 1


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [(Behaviour.BAD_IMAGE, "ImagePull"), (Behaviour.OUT_OF_MEMORY, "CUDAOutOfMemory")],
)
def test_another_failure_stays_one(behaviour: Behaviour, reason: str) -> None:
    world = settle(new({"next_behaviour": behaviour}))
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("False", reason)


def test_a_pod_that_no_node_is_meant_for_is_a_failure() -> None:
    """No accelerator that becomes free helps, so the service does not count as one that only lacks room."""
    world = live(new(FULL), 10.0)
    pods = tuple(
        replace(pod, unschedulable=SELECTOR) if pod.unschedulable else pod for pod in world.pods
    )
    world = replace(world, pods=pods, now=world.now + 2 * REPLACE_AFTER_S)
    world = act(world, plan_of(world))
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("False", "Unschedulable")


def test_a_quota_is_a_lack_of_room_too() -> None:
    world = live(new(FULL), 10.0)
    failed = ObjectCondition("ReplicaFailure", "True", "FailedCreate", QUOTA)
    routers = tuple(pod for pod in world.pods if pod.component != "engine")
    world = edited(replace(world, pods=routers), (Kind.DEPLOYMENT, "chat"), conditions=(failed,))
    world = act(world, plan_of(world))
    assert sleep_of(world).state is None
    plan = plan_of(replace(world, now=world.now + REPLACE_AFTER_S))
    assert plan.status is not None
    assert "QuotaExceeded: " in plan.status["sleep"]["message"]


def test_a_service_that_ran_and_lost_its_room_waits_like_any_other() -> None:
    """Its model is proven, and its users were answered: it is not ready, and says why."""
    world = step(settle(new({"gpus": 1})), 120.0)
    world = act(world, plan_of(world))
    lost = tuple(pod for pod in world.pods if pod.component != "engine")
    world = live(replace(world, pods=lost, gpus=0), 3 * REPLACE_AFTER_S)
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("False", "InsufficientGPU")
