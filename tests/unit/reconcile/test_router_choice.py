"""A router stays as it runs, image and kind, until it is rolled out for another reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.types import Kind, Pod, Workload
from tests.support.reconcile.plan_cluster import (
    VLLM_ROUTER_IMAGE,
    settle,
    settled_with_vllm_router,
    step,
)
from tests.support.reconcile.plan_world import World, act, edited, new_world, plan_of, with_spec

ROUTER = (Kind.DEPLOYMENT, "chat-fk-router")
RESTING = settle(new_world())
OLD_IMAGE = RESTING.context.router.image
NEW_IMAGE = "registry.example.com/fleetkeeper-router:next"


def upgraded(world: World) -> World:
    """The world under an operator whose settings name a newer router image."""
    router = world.context.router.model_copy(update={"image": NEW_IMAGE})
    return replace(world, context=replace(world.context, router=router))


def image_in_force(world: World) -> str:
    """The image of the router's live Deployment."""
    live = world.children[ROUTER]
    assert isinstance(live, Workload)
    return live.image


def writes(world: World) -> list[str]:
    """The children that a plan writes."""
    return [item.name for item in plan_of(world).actions if isinstance(item, Apply)]


def test_an_upgrade_with_a_newer_router_image_writes_nothing() -> None:
    """As with engines: an upgrade of the operator restarts no pod of any service."""
    world = upgraded(RESTING)
    assert plan_of(world).is_empty
    assert image_in_force(settle(world)) == OLD_IMAGE


@pytest.mark.parametrize(
    "change",
    [
        {"routing": {"policy": "SessionAffinity"}},
        {"routing": {"resources": {"memory": "3Gi"}}},
        {"rollout": {"engineUpdates": "Automatic"}},
    ],
    ids=str,
)
def test_the_newer_image_comes_with_the_next_rollout_of_the_router(change: dict[str, Any]) -> None:
    """Or without one, if the service takes updates by itself."""
    world = settle(with_spec(upgraded(RESTING), **change))
    assert image_in_force(world) == NEW_IMAGE
    assert plan_of(world).is_empty


def test_a_change_that_does_not_concern_the_router_leaves_its_image() -> None:
    """More routers are not another router."""
    world = settle(with_spec(upgraded(RESTING), routing={"replicas": 3}))
    assert image_in_force(world) == OLD_IMAGE


@pytest.mark.parametrize(
    "broken",
    [{"available_replicas": 0}, {"replicas": 3, "updated_replicas": 1}],
    ids=["none is available", "in a rollout"],
)
def test_an_image_that_does_not_run_is_not_kept(broken: dict[str, int]) -> None:
    """Otherwise a wrong image, once written, could not be corrected."""
    world = edited(upgraded(RESTING), ROUTER, **broken)
    assert writes(world) == ["chat-fk-router"]


def test_an_image_set_by_hand_is_brought_back() -> None:
    """Its template does not have the hash that the operator recorded."""
    world = edited(RESTING, ROUTER, image="somebody/else:1", digest="edited")
    assert writes(world) == ["chat-fk-router"]
    assert image_in_force(settle(world)) == OLD_IMAGE


def test_a_router_with_an_older_image_goes_when_the_service_wants_none() -> None:
    """A policy without routers has no image to compare with the one that runs."""
    world = settle(with_spec(upgraded(RESTING), routing={"policy": "None"}))
    assert ROUTER not in world.children
    assert plan_of(world).is_empty


ACCOUNT = (Kind.SERVICE_ACCOUNT, "chat-fk-router")
BINDING = (Kind.ROLE_BINDING, "chat-fk-router")
POLICY = (Kind.NETWORK_POLICY, "chat-fk-router")


def has_account(world: World) -> bool:
    """Whether its pods have what they need to watch pods."""
    rules = world.manifests[POLICY]["spec"]["egress"]
    reaches = any(port["port"] == 6443 for rule in rules for port in rule["ports"])
    assert (ACCOUNT in world.children) == (BINDING in world.children) == reaches
    return reaches


def test_an_upgrade_replaces_no_vllm_router() -> None:
    """It has other arguments, other memory and an account, and it is written again by nobody."""
    before = settled_with_vllm_router()
    assert plan_of(before).is_empty
    world = settle(before)
    assert image_in_force(world) == VLLM_ROUTER_IMAGE
    assert world.pods == before.pods
    assert has_account(world)
    assert "router" not in world.status


@pytest.mark.parametrize(
    "resources", [{"cpu": "500m"}, {"memory": "2Gi"}, {"cpu": "1", "memory": "2Gi"}]
)
def test_settings_of_an_earlier_release_keep_its_routers_too(resources: dict[str, str]) -> None:
    """What an administrator chose for vllm-router is in the values still, the rest was the chart's."""
    before = settled_with_vllm_router(resources)
    router = before.context.router.model_copy(update=resources)
    assert plan_of(replace(before, context=replace(before.context, router=router))).is_empty


def test_the_status_says_envoy_when_no_other_router_is_left() -> None:
    """Neither a pause nor a rollout that begins makes the old pods Envoy."""
    paused = with_spec(settled_with_vllm_router(), routing={"policy": "RoundRobin"}, paused=True)
    assert "router" not in act(paused, plan_of(paused)).status
    world = with_spec(settled_with_vllm_router(), routing={"policy": "RoundRobin"})
    world = act(world, plan_of(world))
    assert "router" not in world.status
    assert settle(world).status["router"] == "Envoy"


def test_a_foreign_account_of_that_name_is_in_nobodys_way() -> None:
    """The router needs none."""
    key = (Kind.SERVICE_ACCOUNT, "chat-fk-router")
    account = replace(settled_with_vllm_router().children[key], controller_uid="somebody")
    world = with_spec(RESTING, routing={"policy": "RoundRobin"})
    world = replace(world, children={**world.children, key: account})
    world = act(world, plan_of(world))
    assert world.condition("Ready") != ("False", "NameConflict")


def test_a_kept_vllm_router_can_be_scaled() -> None:
    world = settle(with_spec(settled_with_vllm_router(), routing={"replicas": 3}))
    assert image_in_force(world) == VLLM_ROUTER_IMAGE
    assert sum(pod.component == "router" for pod in world.pods) == 3
    assert has_account(world)


@pytest.mark.parametrize(
    "change",
    [{"routing": {"policy": "SessionAffinity"}}, {"rollout": {"engineUpdates": "Automatic"}}],
    ids=str,
)
def test_the_next_rollout_brings_envoy_and_takes_the_account_last(change: dict[str, Any]) -> None:
    """The old pods watch pods until they have ended."""
    world = with_spec(settled_with_vllm_router(), **change)
    world = act(world, plan_of(world))
    assert image_in_force(world) == OLD_IMAGE
    assert has_account(world), "its pods still run"
    while any(pod.template_hash != live_hash(world) for pod in routers(world)):
        assert has_account(act(world, plan_of(world)))
        world = step(world, 1.0)
    world = settle(world)
    assert not has_account(world)
    assert world.status["router"] == "Envoy"
    assert plan_of(world).is_empty


def test_a_rollout_that_goes_no_further_keeps_the_account() -> None:
    """Its old pods serve on, and one that is evicted needs it to start again."""
    world = with_spec(settled_with_vllm_router(), routing={"policy": "RoundRobin"})
    world = step(act(world, plan_of(world)), 1.0)
    world = edited(world, ROUTER, replicas=3, updated_replicas=1, available_replicas=2)
    old = [pod for pod in routers(world) if pod.template_hash != live_hash(world)]
    gone = replace(world, pods=tuple(pod for pod in world.pods if pod not in old))
    assert has_account(act(gone, plan_of(gone)))


def test_a_new_service_says_which_router_it_has() -> None:
    assert RESTING.status["router"] == "Envoy"
    assert "router" not in settle(new_world(routing={"policy": "None"})).status


def routers(world: World) -> list[Pod]:
    """The pods of the router."""
    return [pod for pod in world.pods if pod.component == "router"]


def live_hash(world: World) -> str:
    """The hash of the router's live template."""
    live = world.children[ROUTER]
    assert isinstance(live, Workload)
    return live.template_hash
