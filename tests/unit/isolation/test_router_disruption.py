"""An eviction never takes all routers of a service at once, and never waits for one that stands alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.names import Component, selector
from fleetkeeper.api.parse import parse_service
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.types import Kind
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import act, new_world, plan_of, service, with_spec


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


def test_one_router_that_cannot_start_degrades_the_service_and_stops_nothing() -> None:
    """The other one answers: Available and Ready stay True, and the cause shows."""
    world = settle(new_world())
    waits = next(pod for pod in world.pods if pod.component == Component.ROUTER)
    pending = replace(
        waits,
        ready=False,
        ready_since=None,
        scheduled=False,
        unschedulable="0/1 nodes are available: 1 Insufficient cpu.",
        containers=(),
    )
    pods = tuple(pending if pod.uid == waits.uid else pod for pod in world.pods)
    world = replace(world, pods=pods)
    plan = plan_of(world)
    assert plan.actions == ()
    world = act(world, plan)
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.condition("Degraded") == ("True", "SomeReplicasFailing")
