"""An eviction never takes all routers of a service at once, and never waits for one that stands alone."""

from __future__ import annotations

import pytest

from fleetkeeper.api.names import Component, selector
from fleetkeeper.api.parse import parse_service
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.types import Kind
from tests.support.plan_cluster import settle
from tests.support.plan_world import new_world, service, with_spec


def _router_budgets(routing: dict[str, object]) -> list[Manifest]:
    parsed = parse_service(service(routing=routing))
    context = default_context()
    children = desired_children(parsed, context.catalog.resolve("cuda"), context, replicas=1)
    return [
        child
        for child in children
        if child["kind"] == "PodDisruptionBudget"
        and child["spec"]["selector"]["matchLabels"] == selector("chat", Component.ROUTER)
    ]


@pytest.mark.parametrize("replicas", [2, 5])
def test_a_drain_takes_one_router_at_a_time(replicas: int) -> None:
    """`minAvailable` would block the drain of a node once routers are scaled down to it."""
    (budget,) = _router_budgets({"policy": "LeastLoaded", "replicas": replicas})
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["metadata"]["ownerReferences"][0]["name"] == "chat"


@pytest.mark.parametrize("routing", [{"policy": "None"}, {"policy": "LeastLoaded", "replicas": 1}])
def test_no_budget_blocks_the_drain_of_a_lone_router(routing: dict[str, object]) -> None:
    assert _router_budgets(routing) == []


def test_the_budget_comes_and_goes_with_the_router() -> None:
    key = (Kind.POD_DISRUPTION_BUDGET, "chat-fk-router")
    world = settle(new_world(routing={"policy": "LeastLoaded"}))
    assert key in world.children
    assert key not in settle(with_spec(world, routing={"replicas": 1})).children
    assert key not in settle(with_spec(world, routing={"policy": "None"})).children
