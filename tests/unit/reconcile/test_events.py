"""Events are recorded once, for changes only."""

from __future__ import annotations

from dataclasses import replace

from tests.support.plan_world import (
    Behaviour,
    World,
    act,
    edited,
    live,
    new_world,
    plan_of,
    step,
    with_spec,
)
from tests.support.status_cases import (
    ENGINE,
    RESTING,
    ROUTED,
)


def test_warnings_are_told_once_and_calm_reasons_never() -> None:
    """An event for a change, none while it lasts; being stopped or starting is no warning."""
    world = replace(new_world(), next_behaviour=Behaviour.BAD_IMAGE)
    seen: list[str] = []
    for _ in range(60):
        plan = plan_of(world)
        seen += [f"{notice.type} {notice.reason}" for notice in plan.events]
        world = step(act(world, plan), 5)
    assert seen.count("Warning ImagePull") == 2, "once when it shows, once when it is final"
    stopped = plan_of(with_spec(RESTING, replicas=0)).events
    assert all(notice.type == "Normal" for notice in stopped)


def test_events_speak_plainly() -> None:
    """What was made, what was brought back, what went, what turned ready."""
    plan = plan_of(new_world(routing={"policy": "None"}))
    assert [notice.reason for notice in plan.events] == ["Created"]
    assert plan.events[0].message.endswith("and 2 more")
    (repaired,) = plan_of(edited(RESTING, ENGINE, digest="edited")).events
    assert repaired.reason == "Repaired"
    assert "Deployment chat" in repaired.message
    removed = plan_of(with_spec(ROUTED, routing={"policy": "None"})).events
    assert "Removed" in {notice.reason for notice in removed}


def notices_of_ready(world: World, look_every_s: float = 1.0) -> list[str]:
    """What the look that turns the service ready tells."""
    while world.condition("Ready") != ("True", "AllReplicasReady"):
        plan = plan_of(world)
        told = [notice.reason for notice in plan.events if plan.status is not None]
        world = step(act(world, plan), look_every_s)
    return told


def test_a_service_that_is_up_in_seconds_posts_one_event() -> None:
    """Its creation; that it turned ready is news only where it was told not to be."""
    quick = new_world(routing={"policy": "None"})
    assert notices_of_ready(quick, look_every_s=10.0) == []
    assert notices_of_ready(quick) == ["Ready"], "its start was told first"
    slow = live(replace(quick, gpus=0), 30)
    assert slow.condition("Ready") == ("False", "InsufficientGPU")
    assert notices_of_ready(replace(slow, gpus=8)) == ["Ready"]
