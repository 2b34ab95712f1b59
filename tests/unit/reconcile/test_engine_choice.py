"""An alias is resolved when pods change anyway, and never by an upgrade of the operator."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.reconcile.planner import decide_plan
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import World, new_world, plan_of, with_spec


def newer(world: World, *, keep_old: bool = True) -> World:
    """The operator is upgraded: the alias cuda points to a newer profile."""
    old = world.context.catalog.resolve("cuda")
    new = EngineProfile.model_validate(
        {
            **old.to_manifest(),
            "name": "cuda-0.33.0-1",
            "vllmVersion": "0.33.0",
            "image": "vllm/vllm-openai:v0.33.0",
        }
    )
    profiles = (old, new) if keep_old else (new,)
    catalog = ProfileCatalog(profiles=profiles, aliases=MappingProxyType({"cuda": new.name}))
    return replace(world, context=replace(world.context, catalog=catalog), status_written=None)


RESTING = settle(new_world(routing={"policy": "None"}))
UPGRADED = settle(newer(RESTING))


def engine(world: World) -> dict[str, str]:
    """`status.engine`."""
    return dict(world.status["engine"])


def test_an_upgrade_restarts_nothing_and_shows_the_newer_profile() -> None:
    """The profile in use is stored in the status and is an input."""
    assert not plan_of(newer(RESTING)).actions
    assert UPGRADED.engine.template_hash == RESTING.engine.template_hash
    assert engine(UPGRADED) == {
        "profile": "cuda-0.32.0-1",
        "requested": "cuda",
        "version": "0.32.0",
        "updateAvailable": "cuda-0.33.0-1",
    }


def test_scaling_by_a_person_restarts_nothing() -> None:
    """`kubectl scale` and an HPA move the generation too."""
    world = settle(with_spec(UPGRADED, replicas=3))
    assert engine(world)["profile"] == "cuda-0.32.0-1"
    assert world.engine.template_hash == RESTING.engine.template_hash


def test_a_change_of_the_pods_takes_the_newer_profile() -> None:
    """They restart anyway."""
    world = settle(with_spec(UPGRADED, engine={"maxModelLength": 4096}))
    assert engine(world) == {
        "profile": "cuda-0.33.0-1",
        "requested": "cuda",
        "version": "0.33.0",
    }
    assert world.condition("Ready") == ("True", "AllReplicasReady")


def test_an_exact_name_is_taken_at_once() -> None:
    """A person chose it."""
    world = settle(with_spec(UPGRADED, engine={"profile": "cuda-0.33.0-1"}))
    assert engine(world)["profile"] == "cuda-0.33.0-1"
    back = settle(with_spec(world, engine={"profile": "cuda-0.32.0-1"}))
    assert engine(back)["profile"] == "cuda-0.32.0-1"


def test_automatic_updates_change_one_service_at_a_time() -> None:
    """One service at a time."""
    world = settle(with_spec(UPGRADED, rollout={"engineUpdates": "Automatic"}))
    assert engine(world)["profile"] == "cuda-0.32.0-1"
    allowed = replace(world.snapshot(), may_update_engine=True)
    plan = decide_plan(allowed, world.context, world.now)
    assert len(plan.actions) == 1
    assert plan.status is not None
    assert plan.status["engine"]["profile"] == "cuda-0.33.0-1"
    assert "EngineChanged" in {event.reason for event in plan.events}


def test_a_permitted_update_without_automatic_updates_changes_nothing() -> None:
    """OnSpecChange updates only with a change of the spec."""
    allowed = replace(UPGRADED.snapshot(), may_update_engine=True)
    assert decide_plan(allowed, UPGRADED.context, UPGRADED.now).is_empty


def test_a_profile_that_was_dropped_keeps_what_runs() -> None:
    """UnknownProfile, no write; the message names both ways out."""
    world = settle(newer(RESTING, keep_old=False))
    assert world.engine == RESTING.engine
    assert world.condition("Available") == ("True", "Answering")
    (stalled,) = [item for item in world.status["conditions"] if item["type"] == "Stalled"]
    assert stalled["reason"] == "UnknownProfile"
    assert "cuda-0.32.0-1" in stalled["message"]
    assert "set spec.engine.profile to cuda-0.33.0-1" in stalled["message"]
    fixed = settle(with_spec(world, engine={"profile": "cuda-0.33.0-1"}))
    assert fixed.condition("Ready") == ("True", "AllReplicasReady")
