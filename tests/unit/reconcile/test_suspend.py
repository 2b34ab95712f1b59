"""Suspended and back: no replicas, and then the previous number, in every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.parse import parse_service
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.common.activation import Activation, State, activation_of
from fleetkeeper.common.budget import Allowance
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.runtime.autoscaler.inputs import read_settings
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import World, act, new_world, plan_of, service, with_spec

ENGINE = (Kind.DEPLOYMENT, "chat")
THREE = ReplicaAllocation(3, "QueueWaitAboveTarget", "three")


def at_rest(mode: str, replicas: int | None = None, **spec: Any) -> World:
    """Three replicas in this mode: set by the spec, by the control loop, or by a person before."""
    scaling = {"mode": mode, "minReplicas": 1, "maxReplicas": 8}
    if mode == "Advisory":
        world = settle(new_world(replicas=3, **spec))
        world = settle(with_spec(world, replicas=None, scaling=scaling))
    else:
        pinned = {} if replicas is None else {"replicas": replicas}
        world = new_world(scaling=scaling, **pinned, **spec)
        world = settle(replace(world, allocation=THREE if replicas is None else None))
        world = replace(world, allocation=None)
    assert world.engine.desired_replicas == 3
    return world


MODES = [("Auto", None), ("Auto", 3), ("Advisory", None), ("External", 3)]


@pytest.mark.parametrize(("mode", "replicas"), MODES)
def test_a_suspended_service_comes_back_with_the_replicas_of_before(
    mode: str, replicas: int | None
) -> None:
    """Twice: the second time remembers the first no more."""
    world = at_rest(mode, replicas)
    for _ in range(2):
        world = settle(with_spec(world, suspend=True))
        assert world.engine.desired_replicas == 0
        assert world.resource["spec"].get("replicas") == replicas
        assert world.condition("Available") == ("False", "Suspended")
        assert world.condition("Ready") == ("False", "Suspended")
        assert world.condition("Progressing") == ("False", "Suspended")
        assert world.condition("Stalled") is None
        assert plan_of(world).is_empty
        world = settle(with_spec(world, suspend=False))
        assert world.engine.desired_replicas == 3
        assert world.condition("Ready") == ("True", "AllReplicasReady")
        assert "suspendedReplicas" not in world.status
        assert plan_of(world).is_empty


def test_the_number_is_in_the_status_before_the_first_replica_goes() -> None:
    """The reconcile that begins only adds it, so a crash after it loses nothing."""
    world = with_spec(at_rest("Auto"), suspend=True)
    plan = plan_of(world)
    assert plan.actions == ()
    assert plan.events == ()
    assert plan.status == {**world.status, "suspendedReplicas": 3}
    assert plan.requeue_after_s == 0
    (write,) = [item for item in plan_of(act(world, plan)).actions if isinstance(item, Apply)]
    assert (write.kind, write.name) == ENGINE
    assert write.manifest["spec"]["replicas"] == 0


@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_crash_between_any_two_writes_loses_no_number(*, is_suspended: bool) -> None:
    """The Deployment is written and the status is not: the next reconcile comes to the same end."""
    world = at_rest("Auto")
    if not is_suspended:
        world = settle(with_spec(world, suspend=True))
    world = with_spec(world, suspend=is_suspended)
    for _ in range(4):
        plan = plan_of(world)
        world = act(world, replace(plan, status=None) if plan.actions else plan)
    world = settle(replace(world, status_written=None))
    world = settle(with_spec(world, suspend=False))
    assert world.engine.desired_replicas == 3


def test_an_allocation_of_the_time_without_replicas_does_not_count() -> None:
    """The control loop saw none, so it asks for the minimum."""
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    stale = ReplicaAllocation(1, "MinReplicas", "at least 1 replicas are required")
    plan = plan_of(with_spec(replace(world, allocation=stale), suspend=False))
    (write,) = [item for item in plan.actions if isinstance(item, Apply)]
    assert write.manifest["spec"]["replicas"] == 3


def test_the_control_loop_decides_nothing_until_the_number_is_back() -> None:
    """Its settings pin 0 while suspended, and then the number in the status."""
    parsed = parse_service(service(suspend=True)).spec
    suspended = settings_of(parsed, 1, resumed=3)
    assert suspended.activation == Activation(State.SUSPENDED, 0)
    assert not suspended.tunes_replicas
    resumed = settings_of(parse_service(service()).spec, 1, resumed=3)
    assert resumed.activation == Activation(State.RESUMING, 3)
    assert not resumed.tunes_replicas
    assert settings_of(parse_service(service()).spec, 1).tunes_replicas
    assert settings_of(
        parse_service(service(replicas=2)).spec, 1, resumed=3
    ).activation == Activation(State.PINNED, 2)
    paused = settings_of(parse_service(service(suspend=True, paused=True)).spec, 1)
    assert paused.activation.is_scaled


def test_the_control_loop_reads_the_number_from_the_status() -> None:
    waiting = parse_service({**service(), "status": {"suspendedReplicas": 3}})
    assert (
        read_settings(waiting, ControlMemory(), default_context().catalog).activation.replicas == 3
    )
    running = parse_service(service())
    assert read_settings(running, ControlMemory(), default_context().catalog).activation.is_scaled


@pytest.mark.parametrize(("least", "most", "found"), [(5, 8, 5), (1, 2, 2), (1, 8, 3)])
def test_bounds_that_changed_meanwhile_apply(least: int, most: int, found: int) -> None:
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    scaling = {"mode": "Auto", "minReplicas": least, "maxReplicas": most}
    world = settle(with_spec(world, suspend=False, scaling=scaling))
    assert world.engine.desired_replicas == found


@pytest.mark.parametrize("replicas", [5, 0])
def test_spec_replicas_that_changed_meanwhile_win(replicas: int) -> None:
    """An HPA may go on to set it; 0 then stops the service, and forgets the number."""
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    world = settle(with_spec(world, replicas=replicas))
    assert world.engine.desired_replicas == 0
    assert world.condition("Ready") == ("False", "Suspended")
    world = settle(with_spec(world, suspend=False))
    assert world.engine.desired_replicas == replicas
    assert "suspendedReplicas" not in world.status
    if replicas == 0:
        assert world.condition("Ready") == ("False", "Stopped")
        assert settle(with_spec(world, replicas=None)).engine.desired_replicas == 1


def test_paused_wins_and_the_suspension_waits() -> None:
    """No child is written, nothing is remembered, and the status says Paused."""
    world = settle(with_spec(at_rest("Auto"), suspend=True, paused=True))
    assert world.engine.desired_replicas == 3
    assert "suspendedReplicas" not in world.status
    assert world.condition("Progressing") == ("False", "Paused")
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    world = settle(with_spec(world, paused=False))
    assert world.engine.desired_replicas == 0
    assert world.status["suspendedReplicas"] == 3


def test_paused_while_suspended_stays_without_replicas() -> None:
    """Also when suspend is taken back: nothing starts until paused is false."""
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    world = settle(with_spec(world, paused=True))
    assert world.condition("Available") == ("False", "Suspended")
    assert world.condition("Progressing") == ("False", "Paused")
    world = settle(with_spec(world, suspend=False))
    assert world.engine.desired_replicas == 0
    assert world.status["suspendedReplicas"] == 3
    assert settle(with_spec(world, paused=False)).engine.desired_replicas == 3


def test_the_other_children_stay_as_with_stopped() -> None:
    """Router and address wait for the replicas, and the engines' Deployment differs by its number."""
    before = at_rest("Auto")
    world = settle(with_spec(before, suspend=True))
    assert set(world.children) == set(before.children)
    assert {key: child.digest for key, child in world.children.items()} == {
        key: child.digest for key, child in before.children.items()
    }


def test_a_service_that_starts_suspended_has_no_number_and_starts_at_its_minimum() -> None:
    world = settle(new_world(suspend=True, scaling={"minReplicas": 2}))
    assert world.engine.desired_replicas == 0
    assert "suspendedReplicas" not in world.status
    world = settle(with_spec(world, suspend=False))
    assert world.engine.desired_replicas == 2


def test_a_budget_without_room_delays_the_return() -> None:
    """Others took the accelerators; the number is kept until some replica runs."""
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    full = replace(world, allowance=Allowance(0, "the GPU budget"))
    world = settle(with_spec(full, suspend=False))
    assert world.engine.desired_replicas == 0
    assert world.status["suspendedReplicas"] == 3
    assert world.condition("ScalingLimited") == ("True", "GPUBudget")
    free = settle(replace(world, allowance=Allowance(8, "the GPU budget")))
    assert free.engine.desired_replicas == 3


def test_an_invalid_spec_keeps_the_number() -> None:
    """The block hides the spec, not the memory."""
    world = settle(with_spec(at_rest("Auto"), suspend=True))
    good = world.resource["spec"]["model"]
    world = settle(with_spec(world, model={"source": "s3://bucket/model"}))
    assert world.status["suspendedReplicas"] == 3
    world = settle(with_spec(world, model=good, suspend=False))
    assert world.engine.desired_replicas == 3


@pytest.mark.parametrize(
    ("spec", "remembered", "state", "replicas"),
    [
        ({}, None, State.SCALED, None),
        ({}, 3, State.RESUMING, 3),
        ({"replicas": 0}, None, State.PINNED, 0),
        ({"replicas": 2}, 3, State.PINNED, 2),
        ({"replicas": 2, "suspend": True}, 3, State.SUSPENDED, 0),
        ({"suspend": True, "paused": True}, 3, State.RESUMING, 3),
        ({"suspend": True, "paused": True, "replicas": 2}, None, State.PINNED, 2),
    ],
)
def test_the_first_field_that_is_set_decides_the_activation(
    spec: dict[str, Any], remembered: int | None, state: State, replicas: int | None
) -> None:
    found = activation_of(parse_service(service(**spec)).spec, remembered)
    assert (found.state, found.replicas) == (state, replicas)
    assert found.is_off == (replicas == 0)
    assert found.floor(5) == (5 if replicas is None else replicas)
