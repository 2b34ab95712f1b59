"""The router and the other children around the engines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from fleetkeeper.api.names import Component, selector
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.types import RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext, RouterSettings, default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.router import Router
from fleetkeeper_router.settings import Settings
from tests.support.reconcile.random_specs import service_manifest

ROUTER_CHILDREN = {
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
}


def _children(
    context: PlanContext | None = None, router: Router | None = None, **sections: Any
) -> dict[str, Manifest]:
    context = context or default_context()
    spec = {"model": {"source": "pvc://models/llama"}, **sections}
    service = parse_service(service_manifest(spec))
    profile = context.catalog.resolve("cuda")
    built = desired_children(service, profile, context, replicas=1, router=router)
    return {f"{child['kind']}/{child['metadata']['name']}": child for child in built}


def _router(**sections: Any) -> Manifest:
    template: Manifest = _children(**sections)["Deployment/chat-fk-router"]["spec"]["template"]
    return template


def _container(**sections: Any) -> Manifest:
    (container,) = _router(**sections)["spec"]["containers"]
    return cast("Manifest", container)


def _settings(**sections: Any) -> Settings:
    """The settings as the image reads them: a variable that it does not know is an error there."""
    return Settings.of_environment(
        {one["name"]: one["value"] for one in _container(**sections)["env"]}
    )


@pytest.mark.parametrize("policy", [one for one in RoutingPolicy if one is not RoutingPolicy.NONE])
def test_the_image_knows_each_policy(policy: RoutingPolicy) -> None:
    assert _settings(routing={"policy": str(policy)}).policy == str(policy)


def test_the_image_knows_what_the_pod_has() -> None:
    """Its own engines by the name of their Service, its memory, and the times of the spec."""
    resources = {"memory": "1Gi"}
    settings = _settings(routing={"resources": resources}, rollout={"drainSeconds": 77})
    assert settings.engines == "chat-fk-engines"
    assert (settings.engine_port, settings.health_port) == (8000, 9090)
    assert settings.memory_bytes == 2**30
    assert (settings.drain_seconds, settings.request_timeout_seconds) == (77, 3600)


def test_the_name_of_the_engines_has_those_that_are_not_ready_too() -> None:
    """The router asks them itself, so it knows a replica as soon as it is ready."""
    service = _children()["Service/chat-fk-engines"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == selector("chat", Component.ENGINE)


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


def test_a_service_without_a_router_has_none_of_its_children() -> None:
    """They are pruned when the policy changes; the address then points at the engines."""
    children = _children(routing={"policy": "None"})
    assert not [name for name in children if name.endswith(("-fk-router", "-fk-engines"))]
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
def test_a_router_of_an_earlier_release_has_an_account_and_the_fixed_role(
    kind: Literal["ClusterRole", "Role"],
) -> None:
    """In namespaced mode the chart makes a Role of that name in each namespace."""
    settings = RouterSettings(role_kind=kind)
    context = replace(default_context(), router=settings)
    router = Router(settings, is_vllm_router=True, watches_pods=True)
    children = _children(context, router)
    binding = children["RoleBinding/chat-fk-router"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": kind,
        "name": "fleetkeeper-router",
    }
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "chat-fk-router", "namespace": "team-a"}
    ]
    pod = children["Deployment/chat-fk-router"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "chat-fk-router"
    assert pod["automountServiceAccountToken"] is True
    assert children["ServiceAccount/chat-fk-router"]["automountServiceAccountToken"] is False


def test_a_router_has_no_account_of_its_own_no_token_and_no_volume() -> None:
    """The API server keeps the name of an account that a later apply leaves out, so it is named."""
    pod = _router()["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "default"
    assert "volumes" not in pod


def test_a_router_that_ends_is_unready_before_its_connections_end() -> None:
    """Service rules need seconds to follow; then running requests may end."""
    spec = _router(rollout={"drainSeconds": 60})["spec"]
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == [*container["command"], "drain"]
    settings = _settings(rollout={"drainSeconds": 60})
    assert settings.notice_seconds >= 5
    assert spec["terminationGracePeriodSeconds"] > settings.notice_seconds + settings.drain_seconds


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
    assert list(_children())[-1] == "Service/chat"


def test_pull_secrets_of_the_installation_come_first_and_once() -> None:
    """For engines and routers."""
    context = replace(default_context(), image_pull_secrets=("ours", "shared"))
    children = _children(context, imagePullSecrets=[{"name": "shared"}, {"name": "theirs"}])
    wanted = [{"name": "ours"}, {"name": "shared"}, {"name": "theirs"}]
    for name in ("chat", "chat-fk-router"):
        pod = children[f"Deployment/{name}"]["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == wanted
