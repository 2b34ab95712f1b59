"""A router keeps the image with which it runs until it is rolled out for another reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.types import Kind, Workload
from tests.support.plan_cluster import settle
from tests.support.plan_world import World, edited, new_world, plan_of, with_spec

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
