"""Events are recorded once, for changes only."""

from __future__ import annotations

from dataclasses import replace

from tests.support.reconcile.plan_cluster import live, step
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    edited,
    new_world,
    plan_of,
    with_spec,
)
from tests.support.reconcile.status_cases import (
    ENGINE,
    RESTING,
    ROUTED,
)


def test_warnings_are_recorded_once_and_calm_reasons_never() -> None:
    """An event for a change, none while it lasts; being stopped or starting is no warning."""
    world = replace(new_world(), next_behaviour=Behaviour.BAD_IMAGE)
    seen: list[str] = []
    for _ in range(60):
        plan = plan_of(world)
        seen += [f"{event.type} {event.reason}" for event in plan.events]
        world = step(act(world, plan), 5)
    assert seen.count("Warning ImagePull") == 2, "once when it shows, once when it is final"
    stopped = plan_of(with_spec(RESTING, replicas=0)).events
    assert all(event.type == "Normal" for event in stopped)


def test_events_name_created_restored_and_removed_children() -> None:
    """Each kind of change has its own event."""
    plan = plan_of(new_world(routing={"policy": "None"}))
    assert [event.reason for event in plan.events] == ["Created"]
    assert plan.events[0].message.endswith("and 2 more")
    (repaired,) = plan_of(edited(RESTING, ENGINE, digest="edited")).events
    assert repaired.reason == "Repaired"
    assert "Deployment chat" in repaired.message
    removed = plan_of(with_spec(ROUTED, routing={"policy": "None"})).events
    assert "Removed" in {event.reason for event in removed}


def ready_events(world: World, every_s: float = 1.0) -> list[str]:
    """The events of the reconcile that finds the service ready."""
    while world.condition("Ready") != ("True", "AllReplicasReady"):
        plan = plan_of(world)
        reasons = [event.reason for event in plan.events if plan.status is not None]
        world = step(act(world, plan), every_s)
    return reasons


def test_a_service_that_is_up_in_seconds_posts_one_event() -> None:
    """Its creation. Ready has an event only if the status had reported Ready=False."""
    quick = new_world(routing={"policy": "None"})
    assert ready_events(quick, every_s=10.0) == []
    assert ready_events(quick) == ["Ready"], "its start was reported first"
    slow = live(replace(quick, gpus=0), 30)
    assert slow.condition("Ready") == ("False", "InsufficientGPU")
    assert ready_events(replace(slow, gpus=8)) == ["Ready"]
