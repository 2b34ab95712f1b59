"""Events are recorded once, for changes only."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.common.sleep import Idle, Wake
from fleetkeeper.common.values import Event
from fleetkeeper_contract.sleep import WakeMark
from fleetkeeper_contract.tiers import Tier
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import (
    START,
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


def sleeping_service() -> World:
    """A service at rest that may sleep, and whose gateway can wake it."""
    scaling = {"sleep": {"minAwakeSeconds": 0}}
    world = new_world(access="Gateway", scaling=scaling, routing={"policy": "None"})
    context = replace(world.context, grant_keys='{"keys": [{"kid": "a"}]}')
    return settle(replace(world, context=context, wake=Wake(can_wake=True)))


def driven(world: World, available: tuple[str, str]) -> tuple[World, list[Event]]:
    """The world when its condition Available has this status and reason, and the events until then.

    The service is idle until there is a wake mark.
    """
    events: list[Event] = []
    while world.condition("Available") != available:
        assert world.now < START + 3600, world.status
        world = replace(world, idle=Idle(world.wake.mark is None, world.now))
        plan = plan_of(world)
        events += plan.events
        world = step(act(world, plan), 5)
    return world, events


def marked(world: World) -> World:
    """The world in which a realtime request waits for a replica."""
    mark = WakeMark(world.status["sleep"]["number"], Tier.REALTIME)
    return replace(world, wake=Wake(can_wake=True, mark=mark))


ASLEEP = ("False", "Asleep")
ANSWERING = ("True", "Answering")


def test_sleep_and_wake_are_recorded_once_and_are_no_warning() -> None:
    world, events = driven(sleeping_service(), ASLEEP)
    _, woken = driven(marked(world), ANSWERING)
    events += woken
    assert {event.type for event in events} == {"Normal"}
    assert [event.reason for event in events] == ["Asleep", "Scaled", "Waking", "Scaled"]
    assert events[2].message == "The service starts its replicas with the rank of tier realtime"


def test_a_wake_that_fails_is_one_warning_and_the_next_one_is_not_called_ready() -> None:
    world, _ = driven(sleeping_service(), ASLEEP)
    broken = replace(world, behaviours={world.engine.template_hash: Behaviour.BAD_IMAGE})
    world, waking = driven(marked(broken), ("False", "ImagePull"))
    world, failed = driven(world, ASLEEP)
    assert [event.reason for event in (*waking, *failed)] == [
        *("Waking", "Scaled", "Scaled", "WakeFailed"),
    ]
    assert failed[-1].message.startswith("The last start failed: ImagePull: ")
    assert failed[-1].type == "Warning"
    silent = replace(world, behaviours={world.engine.template_hash: Behaviour.SILENT})
    world, waking = driven(marked(silent), ("False", "Waking"))
    assert world.condition("Ready") == ("False", "WakeFailed")
    assert [event.reason for event in waking] == ["Waking", "Scaled"]


def test_replicas_that_a_sleeping_service_still_has_are_no_warning() -> None:
    world, _ = driven(sleeping_service(), ASLEEP)
    running = replace(world, pods=sleeping_service().pods)
    plan = plan_of(running)
    running = act(running, plan)
    assert running.condition("Ready") == ("True", "Asleep")
    assert running.condition("Available") == ("True", "Answering")
    assert plan.events == ()
    assert plan_of(replace(running, pods=(), now=running.now + 60)).events == ()
