"""The Kubernetes Service: its type, and who may choose it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.parse import parse_service
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.manifests.address import desired_address
from fleetkeeper.reconcile.planner import decide_plan
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import World, new_world, plan_of, service, with_spec

ALLOWED = replace(default_context(), exposed_service_types=("LoadBalancer",))


def written(**section: Any) -> Manifest:
    return desired_address(parse_service(service(service=section)))


def test_a_section_with_defaults_writes_the_service_of_before() -> None:
    """An upgrade writes no Service."""
    assert written() == desired_address(parse_service(service()))
    assert written()["spec"]["type"] == "ClusterIP"
    assert "annotations" not in written()["metadata"]


def test_only_what_the_spec_names_is_owned() -> None:
    """Never a port or an address that the cluster assigns."""
    found = written(
        type="LoadBalancer", loadBalancerClass="example.com/x", annotations={"a": "b", "c": ""}
    )
    assert found["metadata"]["annotations"] == {"a": "b", "c": ""}
    assert set(found["spec"]) == {"type", "loadBalancerClass", "selector", "ports"}
    assert set(found["spec"]["ports"][0]) == {"name", "port", "protocol", "targetPort"}


def test_each_part_of_the_section_changes_the_digest() -> None:
    sections: tuple[dict[str, Any], ...] = (
        {},
        {"type": "NodePort"},
        {"type": "LoadBalancer"},
        {"type": "LoadBalancer", "loadBalancerClass": "x"},
        {"annotations": {"a": ""}},
        {"annotations": {"a": "b"}},
    )
    assert len({digest_of(written(**section)) for section in sections}) == len(sections)


@pytest.mark.promise("exposed-services")
@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_by_default_no_service_leaves_the_cluster(kind: str) -> None:
    """The running service stays as it is, and the status names the field and the setting."""
    world = settle(new_world())
    plan = plan_of(with_spec(world, service={"type": kind}))
    assert plan.actions == ()
    assert "spec.service.type" in str(plan.status)
    assert "exposedServiceTypes" in str(plan.status)


def test_the_administrator_allows_each_type_of_its_own() -> None:
    for kind, is_allowed in (("LoadBalancer", True), ("NodePort", False), ("ClusterIP", True)):
        asked = World(service(service={"type": kind}))
        assert bool(decide_plan(asked.snapshot(), ALLOWED, 0.0).actions) is is_allowed


def test_a_service_that_is_exposed_waits_for_its_first_router_too() -> None:
    """From routing None to a router: the address keeps the engines until a router is ready."""
    exposed = {"service": {"type": "LoadBalancer"}}
    world = replace(new_world(routing={"policy": "None"}, **exposed), context=ALLOWED)
    world = settle(world)
    plan = plan_of(with_spec(world, routing={"policy": "LeastLoaded"}))
    assert ("Service", "chat") not in {(str(item.kind), item.name) for item in plan.actions}  # type: ignore[union-attr]
