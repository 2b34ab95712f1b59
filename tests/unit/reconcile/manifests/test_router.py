"""The router and the other children around the engines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest

from fleetkeeper.api.names import Component, selector
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.quantity import parse_quantity
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext, RouterSettings, default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from tests.support.random_specs import service_manifest

ROUTER_CHILDREN = {
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "RoleBinding",
    "ServiceAccount",
}


def _children(context: PlanContext | None = None, **sections: Any) -> dict[str, Manifest]:
    context = context or default_context()
    spec = {"model": {"source": "pvc://models/llama"}, **sections}
    service = parse_service(service_manifest(spec))
    profile = context.catalog.resolve("cuda")
    built = desired_children(service, profile, context, replicas=1)
    return {f"{child['kind']}/{child['metadata']['name']}": child for child in built}


def _router(**sections: Any) -> Manifest:
    template: Manifest = _children(**sections)["Deployment/chat-fk-router"]["spec"]["template"]
    return template


def _arguments(**sections: Any) -> list[str]:
    (container,) = _router(**sections)["spec"]["containers"]
    assert container["command"] == ["vllm-router"]
    return list(container["args"])


@pytest.mark.parametrize(
    ("policy", "flag"),
    [
        ("LeastLoaded", "power_of_two"),
        ("SessionAffinity", "consistent_hash"),
        ("PrefixAware", "cache_aware"),
        ("RoundRobin", "round_robin"),
    ],
)
def test_each_policy_is_one_of_the_routers(policy: str, flag: str) -> None:
    """In the router's own words."""
    assert f"--policy={flag}" in _arguments(routing={"policy": policy})


def test_a_router_that_remembers_prompts_has_a_bound_that_fits_its_memory() -> None:
    """9 bytes per token of each replica, measured; at the router's own bound four replicas take 1.2 GiB."""
    bound = dict(
        item.removeprefix("--").split("=", 1)
        for item in _arguments(routing={"policy": "PrefixAware"})
        if "=" in item
    )
    replicas, bytes_a_token = 16, 9
    remembered = int(bound["max-tree-size"]) * replicas * bytes_a_token
    assert remembered < parse_quantity(default_context().router.memory) / 2
    assert int(bound["eviction-interval-secs"]) <= 10
    assert not any("tree" in item for item in _arguments())


def test_two_routers_prefer_different_nodes_and_never_wait_for_one() -> None:
    """Each revision counts alone, so a rollout does not end with both on one node."""
    deployment = _children()["Deployment/chat-fk-router"]["spec"]
    assert deployment["replicas"] == 2
    (spread,) = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["matchLabelKeys"] == ["pod-template-hash"]
    assert spread["labelSelector"]["matchLabels"] == selector("chat", Component.ROUTER)


def test_a_services_router_resources_replace_the_operators_one_by_one() -> None:
    """The one that is absent stays the operator's setting."""
    context = replace(default_context(), router=RouterSettings(cpu="300m", memory="768Mi"))
    built = _children(context, routing={"resources": {"cpu": "2"}})["Deployment/chat-fk-router"]
    (container,) = built["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "limits": {"memory": "768Mi"},
        "requests": {"cpu": "2", "memory": "768Mi"},
    }


def test_the_routers_placement_is_not_the_engines() -> None:
    """Engines go to nodes with accelerators, where a router has no business."""
    placement = {"nodeSelector": {"pool": "cpu"}, "priorityClassName": "serving"}
    children = _children(
        routing={"placement": placement}, placement={"nodeSelector": {"gpu": "h100"}}
    )
    router = children["Deployment/chat-fk-router"]["spec"]["template"]["spec"]
    engine = children["Deployment/chat"]["spec"]["template"]["spec"]
    assert (router["nodeSelector"], router["priorityClassName"]) == ({"pool": "cpu"}, "serving")
    assert engine["nodeSelector"] == {"gpu": "h100"}
    assert "priorityClassName" not in engine


def test_the_router_finds_this_services_engines_alone() -> None:
    """By namespace, by both labels, at the engines' port."""
    arguments = _arguments()
    at = arguments.index("--selector")
    wanted = [f"{key}={text}" for key, text in selector("chat", Component.ENGINE).items()]
    assert arguments[at + 1 : at + 3] == wanted
    assert arguments[at + 3].startswith("--")
    assert "--service-discovery-namespace=team-a" in arguments
    assert "--service-discovery-port=8000" in arguments


def test_nothing_waits_unmeasured_in_the_router() -> None:
    """No queue, few tries; the circuit opens one failure before the tries end."""
    numbers = {name: text for name, _, text in (one.partition("=") for one in _arguments()) if text}
    assert numbers["--queue-size"] == "0"
    tries, opens_at = numbers["--retry-max-retries"], numbers["--cb-failure-threshold"]
    assert int(opens_at) < int(tries)
    waits_ms = int(tries) * int(numbers["--retry-max-backoff-ms"])
    assert waits_ms <= 500


def test_a_service_without_a_router_has_none_of_its_children() -> None:
    """They are pruned when the policy changes; the address then points at the engines."""
    children = _children(routing={"policy": "None"})
    assert not [name for name in children if name.endswith("-fk-router")]
    assert children["Service/chat"]["spec"]["selector"] == selector("chat", Component.ENGINE)
    with_router = _children()
    assert {name.split("/")[0] for name in with_router if name.endswith("-fk-router")} == (
        ROUTER_CHILDREN
    )
    assert with_router["Service/chat"]["spec"]["selector"] == selector("chat", Component.ROUTER)


def test_the_address_port_leads_to_a_port_that_the_pods_name() -> None:
    """By name, so that router and engine may listen at different numbers."""
    for policy in ("LeastLoaded", "None"):
        children = _children(routing={"policy": policy})
        (port,) = children["Service/chat"]["spec"]["ports"]
        target = "chat" if policy == "None" else "chat-fk-router"
        pod = children[f"Deployment/{target}"]["spec"]["template"]["spec"]
        names = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
        assert port["port"] == 80
        assert names[port["targetPort"]] == (8000 if policy == "None" else 8080)


@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
def test_the_binding_names_the_fixed_role_and_the_routers_own_account(
    kind: Literal["ClusterRole", "Role"],
) -> None:
    """In namespaced mode the chart makes a Role of that name in each namespace."""
    context = default_context()
    context = replace(context, router=RouterSettings(role_kind=kind))
    binding = _children(context)["RoleBinding/chat-fk-router"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": kind,
        "name": "fleetkeeper-router",
    }
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "chat-fk-router", "namespace": "team-a"}
    ]
    assert _router()["spec"]["serviceAccountName"] == "chat-fk-router"


def test_only_router_pods_hold_a_token() -> None:
    """The account gives none by itself."""
    assert _children()["ServiceAccount/chat-fk-router"]["automountServiceAccountToken"] is False
    assert _router()["spec"]["automountServiceAccountToken"] is True


def test_a_router_that_ends_is_unready_before_its_connections_end() -> None:
    """Service rules need seconds to follow; then running requests may end."""
    spec = _router(rollout={"drainSeconds": 60})["spec"]
    notice_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= 60 + notice_s


def test_evictions_take_what_the_spec_allows_and_always_what_is_broken() -> None:
    """Pods that are not ready never block a node's drain."""
    budget = _children(disruption={"maxUnavailable": 0})["PodDisruptionBudget/chat-fk-engine"]
    assert budget["spec"]["maxUnavailable"] == 0
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["spec"]["selector"]["matchLabels"] == selector("chat", Component.ENGINE)


def test_control_keys_reach_the_engines_as_a_directory() -> None:
    """Never by subPath, which would not follow a rotation; and a rotation restarts nothing."""
    keys = json.dumps({"keys": [{"kid": "a"}]})
    before = _children()
    after = _children(replace(default_context(), control_keys=keys))
    assert after["ConfigMap/chat-fk-control"]["data"]["jwks.json"] == keys
    assert after["Deployment/chat"] == before["Deployment/chat"]
    pod = after["Deployment/chat"]["spec"]["template"]["spec"]
    assert {"name": "control", "configMap": {"name": "chat-fk-control"}} in pod["volumes"]


def test_keys_and_policies_come_before_pods_and_the_address_last() -> None:
    """No pod ever runs without its policy."""
    order = [name.split("/")[0] for name in _children()]
    assert order.index("ConfigMap") < order.index("Deployment")
    policies = [index for index, kind in enumerate(order) if kind == "NetworkPolicy"]
    deployments = [index for index, kind in enumerate(order) if kind == "Deployment"]
    assert policies[0] < deployments[0]
    assert policies[1] < deployments[1]
    assert order[-1] == "Service"


def test_pull_secrets_of_the_installation_come_first_and_once() -> None:
    """For engines and routers."""
    context = replace(default_context(), image_pull_secrets=("ours", "shared"))
    children = _children(context, imagePullSecrets=[{"name": "shared"}, {"name": "theirs"}])
    wanted = [{"name": "ours"}, {"name": "shared"}, {"name": "theirs"}]
    for name in ("chat", "chat-fk-router"):
        pod = children[f"Deployment/{name}"]["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == wanted
