"""Who reaches whom: the rendered NetworkPolicies against a matrix of connections."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from fleetkeeper.api.names import Component, labels
from fleetkeeper.api.parse import InferenceService, parse_service
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.api.profiles.profile import EgressPeer
from fleetkeeper.api.profiles.tracing import Collector, Tracing
from fleetkeeper.reconcile.context import (
    NetworkPeer,
    NetworkRule,
    PlanContext,
    default_context,
)
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.router import Router
from tests.support.reconcile.network_policies import Endpoint, World
from tests.support.reconcile.random_specs import random_services, service_manifest

NAMESPACES = {
    "team-a": {"kubernetes.io/metadata.name": "team-a", "tenant": "a"},
    "team-b": {"kubernetes.io/metadata.name": "team-b", "tenant": "b"},
    "fleetkeeper-system": {"kubernetes.io/metadata.name": "fleetkeeper-system"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
    "kube-system": {"kubernetes.io/metadata.name": "kube-system"},
}


def _pod(namespace: str, ip: str, **pod_labels: str) -> Endpoint:
    return Endpoint(ip=ip, namespace=namespace, labels=pod_labels)


ENGINE = Endpoint("10.1.0.1", "team-a", labels("chat", Component.ENGINE))
ENGINE_2 = Endpoint("10.1.0.2", "team-a", labels("chat", Component.ENGINE))
ROUTER = Endpoint("10.1.0.3", "team-a", labels("chat", Component.ROUTER))
OTHER_ENGINE = Endpoint("10.1.0.4", "team-a", labels("code", Component.ENGINE))
OTHER_ROUTER = Endpoint("10.1.0.5", "team-a", labels("code", Component.ROUTER))
NAMESAKE_ROUTER = Endpoint("10.2.0.5", "team-b", labels("chat", Component.ROUTER))
NEIGHBOUR = _pod("team-a", "10.1.0.9", app="web")
STRANGER = _pod("team-b", "10.2.0.9", app="web")
OPERATOR = Endpoint(
    "10.3.0.1",
    "fleetkeeper-system",
    {"app.kubernetes.io/name": "fleetkeeper", "app.kubernetes.io/component": "operator"},
)
BESIDE_OPERATOR = _pod("fleetkeeper-system", "10.3.0.2", app="debug")
PROMETHEUS = _pod("monitoring", "10.4.0.1", app="prometheus")
DNS = Endpoint("10.5.0.1", "kube-system", {"k8s-app": "kube-dns"})
NODE_DNS = Endpoint("169.254.20.10")
API_SERVER = Endpoint("192.168.7.7")
METADATA = Endpoint("169.254.169.254")
INTERNET = Endpoint("93.184.216.34")
INTERNET_6 = Endpoint("2606:2800:220:1::1")
OUTSIDE = Endpoint("203.0.113.5")
GATEWAY_LABELS = {
    "app.kubernetes.io/name": "fleetkeeper",
    "app.kubernetes.io/component": "gateway",
}
GATEWAY = Endpoint("10.3.0.3", "fleetkeeper-system", GATEWAY_LABELS)
NAMESAKE_GATEWAY = Endpoint("10.2.0.3", "team-b", GATEWAY_LABELS)
WEB_PODS = {"podSelector": {"matchLabels": {"app": "web"}}}
OTHER_PODS = {"podSelector": {"matchLabels": {"app": "other"}}}
TENANT_B = {"namespaceSelector": {"matchLabels": {"tenant": "b"}}}


def _service(**sections: Any) -> InferenceService:
    return parse_service(
        service_manifest({"model": {"source": "pvc://models/llama"}, **sections}, name="chat")
    )


def _world(
    service: InferenceService, context: PlanContext | None = None, *, watches_pods: bool = False
) -> World:
    context = context or default_context()
    router = Router(context.router, is_vllm_router=watches_pods, watches_pods=watches_pods)
    profile = context.catalog.resolve("cuda")
    return World(
        namespaces=NAMESPACES,
        policies=tuple(
            child
            for child in desired_children(service, profile, context, replicas=1, router=router)
            if child["kind"] == "NetworkPolicy"
        ),
    )


DEFAULT_MATRIX = [
    # into the engine
    (ROUTER, ENGINE, 8000, True),
    (NEIGHBOUR, ENGINE, 8000, False),
    (STRANGER, ENGINE, 8000, False),
    (OTHER_ROUTER, ENGINE, 8000, False),
    (NAMESAKE_ROUTER, ENGINE, 8000, False),
    (OTHER_ENGINE, ENGINE, 8000, False),
    (ENGINE_2, ENGINE, 8000, False),
    (OPERATOR, ENGINE, 8000, False),
    (PROMETHEUS, ENGINE, 8000, False),
    (OUTSIDE, ENGINE, 8000, False),
    (OPERATOR, ENGINE, 9090, True),
    (PROMETHEUS, ENGINE, 9090, True),
    (BESIDE_OPERATOR, ENGINE, 9090, False),
    (ROUTER, ENGINE, 9090, True),
    (OTHER_ROUTER, ENGINE, 9090, False),
    (NEIGHBOUR, ENGINE, 9090, False),
    (OUTSIDE, ENGINE, 9090, False),
    (ENGINE_2, ENGINE, 29500, False),
    (ROUTER, ENGINE, 29500, False),
    # out of the engine
    (ENGINE, DNS, 53, True),
    (ENGINE, NODE_DNS, 53, True),
    (ENGINE, OUTSIDE, 53, False),
    (ENGINE, NEIGHBOUR, 53, False),
    (ENGINE, API_SERVER, 443, False),
    (ENGINE, API_SERVER, 6443, False),
    (ENGINE, METADATA, 80, False),
    (ENGINE, INTERNET, 443, False),
    (ENGINE, NEIGHBOUR, 80, False),
    (ENGINE, OTHER_ENGINE, 8000, False),
    # into the router
    (NEIGHBOUR, ROUTER, 8080, True),
    (STRANGER, ROUTER, 8080, True),
    (OUTSIDE, ROUTER, 8080, False),
    (PROMETHEUS, ROUTER, 29000, True),
    (NEIGHBOUR, ROUTER, 29000, False),
    (ENGINE, ROUTER, 8080, False),
    # out of the router
    (ROUTER, ENGINE, 8000, True),
    (ROUTER, OTHER_ENGINE, 8000, False),
    (ROUTER, API_SERVER, 443, False),
    (ROUTER, API_SERVER, 6443, False),
    (ROUTER, METADATA, 80, False),
    (ROUTER, NEIGHBOUR, 80, False),
    (ROUTER, DNS, 53, True),
    (ROUTER, OUTSIDE, 53, False),
]


@pytest.mark.parametrize(("source", "target", "port", "passes"), DEFAULT_MATRIX)
def test_default_service(source: Endpoint, target: Endpoint, port: int, *, passes: bool) -> None:
    """With a router, open to the cluster, a model from a claim."""
    assert _world(_service()).lets_through(source, target, port) is passes


def test_names_are_resolved_by_udp_too() -> None:
    """Most are."""
    assert _world(_service()).lets_through(ENGINE, DNS, 53, "UDP")
    assert not _world(_service()).lets_through(ENGINE, DNS, 123, "UDP")
    assert not _world(_service()).lets_through(ENGINE, OUTSIDE, 53, "UDP")


CLIENTS_MATRIX = [
    ({"preset": "SameNamespace"}, NEIGHBOUR, True),
    ({"preset": "SameNamespace"}, STRANGER, False),
    ({"preset": "Cluster"}, STRANGER, True),
    ({"preset": "Cluster"}, OUTSIDE, False),
    (
        {"preset": "Namespaces", "namespaceSelector": {"matchLabels": {"tenant": "b"}}},
        STRANGER,
        True,
    ),
    (
        {"preset": "Namespaces", "namespaceSelector": {"matchLabels": {"tenant": "b"}}},
        NEIGHBOUR,
        False,
    ),
    (
        {"preset": "Namespaces", "namespaceSelector": {"matchLabels": {"tenant": ""}}},
        STRANGER,
        False,
    ),
    ({"preset": "Namespaces", "namespaceSelector": {}}, STRANGER, True),
    ({"preset": "Namespaces", "namespaceSelector": {}}, OUTSIDE, False),
    ({"preset": "Gateway"}, GATEWAY, True),
    ({"preset": "Gateway"}, NAMESAKE_GATEWAY, False),
    ({"preset": "Gateway"}, BESIDE_OPERATOR, False),
    ({"preset": "Gateway"}, NEIGHBOUR, False),
    ({"preset": "Gateway"}, OUTSIDE, False),
    ({"preset": "Gateway", "peers": [WEB_PODS]}, NEIGHBOUR, True),
    ({"preset": "Gateway", "peers": [WEB_PODS]}, STRANGER, False),
    ({"preset": "Gateway", "peers": [WEB_PODS]}, GATEWAY, True),
    ({"preset": "Gateway", "peers": [{"podSelector": {}}]}, NEIGHBOUR, True),
    ({"preset": "Gateway", "peers": [{"podSelector": {}}]}, STRANGER, False),
    ({"preset": "Gateway", "peers": [{"namespaceSelector": {}}]}, STRANGER, True),
    ({"preset": "Gateway", "peers": [{"namespaceSelector": {}}]}, OUTSIDE, False),
    ({"preset": "Gateway", "peers": [{**WEB_PODS, **TENANT_B}]}, STRANGER, True),
    ({"preset": "Gateway", "peers": [{**WEB_PODS, **TENANT_B}]}, NEIGHBOUR, False),
    ({"preset": "Gateway", "peers": [{**OTHER_PODS, **TENANT_B}]}, STRANGER, False),
    ({"preset": "Gateway", "peers": [{"podSelector": {}, **TENANT_B}]}, STRANGER, True),
    ({"preset": "Gateway", "peers": [{"podSelector": {}, **TENANT_B}]}, NEIGHBOUR, False),
    ({"preset": "SameNamespace", "cidrs": [{"cidr": "203.0.113.0/24"}]}, OUTSIDE, True),
    ({"preset": "SameNamespace", "cidrs": [{"cidr": "203.0.113.0/24"}]}, INTERNET, False),
    ({"preset": "SameNamespace", "cidrs": [{"cidr": "203.0.113.0/24"}]}, NEIGHBOUR, True),
    (
        {"cidrs": [{"cidr": "203.0.113.0/24", "except": ["203.0.113.4/30"]}]},
        OUTSIDE,
        False,
    ),
    ({"cidrs": [{"cidr": "2606:2800::/32"}]}, INTERNET_6, True),
]


@pytest.mark.promise("no-prompts-no-secrets", "no-prompts", "engine-port")
@pytest.mark.parametrize("policy", ["LeastLoaded", "None"])
@pytest.mark.parametrize(("clients", "source", "passes"), CLIENTS_MATRIX)
def test_the_policy_decides_who_reaches_the_address(
    policy: str, clients: dict[str, Any], source: Endpoint, *, passes: bool
) -> None:
    """At the router, or at the engines when there is none; the control port stays closed."""
    world = _world(_service(networkPolicy=clients, routing={"policy": policy}))
    target, port = (ENGINE, 8000) if policy == "None" else (ROUTER, 8080)
    assert world.lets_through(source, target, port) is passes
    assert not world.lets_through(source, ENGINE, 9090)
    if policy != "None":
        assert not world.lets_through(source, ENGINE, 8000)


def test_without_a_router_its_labels_open_nothing() -> None:
    """A pod that calls itself the router of a service without one is a pod like any other."""
    world = _world(_service(routing={"policy": "None"}, networkPolicy={"preset": "SameNamespace"}))
    assert not world.lets_through(NAMESAKE_ROUTER, ENGINE, 8000)


def test_a_policy_without_a_selector_opens_to_nobody() -> None:
    """The API refuses it; were it ever to come through, it would be closed, not open."""
    service = _service()
    policy = service.spec.network_policy.model_copy(update={"preset": "Namespaces"})
    closed = replace(service, spec=service.spec.model_copy(update={"network_policy": policy}))
    assert not _world(closed).lets_through(NEIGHBOUR, ROUTER, 8080)


@pytest.mark.promise("grant-demanded")
def test_the_gateway_is_looked_for_in_the_operators_namespace() -> None:
    """Its labels alone are not enough: a tenant can give them to a pod."""
    context = replace(default_context(), operator_namespace="team-b")
    world = _world(_service(networkPolicy={"preset": "Gateway"}), context)
    assert world.lets_through(NAMESAKE_GATEWAY, ROUTER, 8080)
    assert not world.lets_through(GATEWAY, ROUTER, 8080)


def test_the_removal_of_an_empty_selector_changes_the_digest() -> None:
    """Digests ignore {}, so it is never written."""
    peers: tuple[list[dict[str, Any]], ...] = (
        [{"podSelector": {}}],
        [{"namespaceSelector": {}}],
        [{"podSelector": {}, **TENANT_B}],
        [{**WEB_PODS, "namespaceSelector": {}}],
        [WEB_PODS],
        [],
    )
    digests = {
        digest_of(policy)
        for found in peers
        for policy in _world(_service(networkPolicy={"preset": "Gateway", "peers": found})).policies
        if policy["metadata"]["name"].endswith("router")
    }
    assert len(digests) == len(peers)


HUB = {"source": "hf://acme/model", "revision": "a" * 40}
OBJECTS = {"source": "s3://models/llama", "credentialsSecret": "s3-reader"}


@pytest.mark.promise("engine-egress")
@pytest.mark.parametrize(
    ("target", "port", "passes"),
    [
        (INTERNET, 443, True),
        (INTERNET_6, 443, True),
        (INTERNET, 80, False),
        (METADATA, 443, False),
        (API_SERVER, 443, False),
        (Endpoint("fd00::1"), 443, False),
        (NEIGHBOUR, 443, False),
    ],
)
def test_a_downloading_engine_reaches_the_public_hub_alone(
    target: Endpoint, port: int, *, passes: bool
) -> None:
    """By HTTPS, and never a private address: the node's credentials lie at one."""
    world = _world(_service(model=HUB))
    assert world.lets_through(ENGINE, target, port) is passes


def _with_storage(context: PlanContext, endpoint: str | None) -> PlanContext:
    (cpu, cuda) = context.catalog.profiles
    opened = cuda.model_copy(update={"object_storage": ObjectStorage(endpoint=endpoint)})
    return replace(context, catalog=context.catalog.model_copy(update={"profiles": (cpu, opened)}))


@pytest.mark.promise("engine-egress")
@pytest.mark.parametrize(
    ("endpoint", "target", "port", "passes"),
    [
        (None, INTERNET, 443, True),
        (None, METADATA, 443, False),
        (None, NEIGHBOUR, 443, False),
        ("https://s3.example.com:8443", INTERNET, 8443, True),
        ("https://s3.example.com:8443", INTERNET, 443, False),
        ("http://s3.example.com", INTERNET, 80, True),
        ("http://s3.example.com", METADATA, 80, False),
    ],
)
def test_a_streaming_engine_reaches_public_addresses_on_the_port_of_the_endpoint(
    endpoint: str | None, target: Endpoint, port: int, *, passes: bool
) -> None:
    """Never a private address: the node's credentials lie at one."""
    world = _world(_service(model=OBJECTS), _with_storage(default_context(), endpoint))
    assert world.lets_through(ENGINE, target, port) is passes


def test_only_a_streaming_engine_reaches_object_storage() -> None:
    world = _world(_service(), _with_storage(default_context(), None))
    assert not world.lets_through(ENGINE, INTERNET, 443)


def test_settings_name_the_hosts_of_object_storage() -> None:
    """For example MinIO in the cluster, which no address range names."""
    pods = NetworkPeer(
        namespace_labels=MappingProxyType({"kubernetes.io/metadata.name": "team-b"}),
        pod_labels=MappingProxyType({"app": "web"}),
    )
    rule = NetworkRule(peers=(pods,), tcp_ports=(9000,))
    context = _with_storage(replace(default_context(), object_storage_rule=rule), None)
    world = _world(_service(model=OBJECTS), context)
    assert world.lets_through(ENGINE, STRANGER, 9000)
    assert not world.lets_through(ENGINE, STRANGER, 443)
    assert not world.lets_through(ENGINE, INTERNET, 443)


def test_a_profile_opens_what_its_egress_names() -> None:
    """For example a mirror of models inside the cluster's network."""
    context = default_context()
    (cpu, cuda) = context.catalog.profiles
    opened = cuda.model_copy(update={"egress": (EgressPeer(cidr="10.9.0.0/16", ports=(8443,)),)})
    catalog = context.catalog.model_copy(update={"profiles": (cpu, opened)})
    world = _world(_service(), replace(context, catalog=catalog))
    assert world.lets_through(ENGINE, Endpoint("10.9.1.1"), 8443)
    assert not world.lets_through(ENGINE, Endpoint("10.9.1.1"), 443)
    assert not world.lets_through(ENGINE, Endpoint("10.8.1.1"), 8443)


COLLECTOR = _pod("monitoring", "10.4.0.7", app="collector")


@pytest.mark.parametrize(
    ("collector", "target", "port", "passes"),
    [
        ({"pod_labels": {"app": "collector"}}, COLLECTOR, 4317, True),
        ({"pod_labels": {"app": "collector"}}, COLLECTOR, 4318, False),
        ({"pod_labels": {"app": "collector"}}, PROMETHEUS, 4317, False),
        ({"pod_labels": {"app": "collector"}, "port": 14317}, COLLECTOR, 14317, True),
        ({"pod_labels": {"app": "collector"}, "port": 14317}, COLLECTOR, 4317, False),
    ],
)
def test_a_traced_engine_reaches_its_collector_alone(
    collector: dict[str, Any], target: Endpoint, port: int, *, passes: bool
) -> None:
    """On the port of its pods. Without tracing it does not reach it."""
    of = Collector(namespace_labels=NAMESPACES["monitoring"], **collector)
    traced = Tracing(endpoint="http://collector.monitoring:4317", collector=of)
    context = default_context()
    (cpu, cuda) = context.catalog.profiles
    profiles = (cpu, cuda.model_copy(update={"tracing": traced}))
    catalog = context.catalog.model_copy(update={"profiles": profiles})
    world = _world(_service(), replace(context, catalog=catalog))
    assert world.lets_through(ENGINE, target, port) is passes
    assert not world.lets_through(ROUTER, target, port)
    assert not _world(_service()).lets_through(ENGINE, target, port)


def test_without_peers_a_port_is_closed_to_everybody() -> None:
    """An empty list of peers would mean everybody; the rule is left out instead."""
    context = replace(default_context(), operator_peers=(), prometheus_peers=())
    world = _world(_service(), context)
    for source in (OPERATOR, PROMETHEUS, NEIGHBOUR, OUTSIDE):
        assert not world.lets_through(source, ENGINE, 9090)
    assert not world.lets_through(PROMETHEUS, ROUTER, 29000)
    assert world.lets_through(ROUTER, ENGINE, 8000)


def test_settings_narrow_names_and_api_server() -> None:
    """DNS to its pods alone, the API server to its address alone."""
    dns_pods = NetworkPeer(
        namespace_labels=MappingProxyType({"kubernetes.io/metadata.name": "kube-system"}),
        pod_labels=MappingProxyType({"k8s-app": "kube-dns"}),
    )
    context = replace(
        default_context(),
        dns_rule=NetworkRule(peers=(dns_pods,), tcp_ports=(53,), udp_ports=(53,)),
        api_server_rule=NetworkRule(peers=(NetworkPeer(cidr="192.168.7.7/32"),), tcp_ports=(6443,)),
    )
    world = _world(_service(), context, watches_pods=True)
    assert world.lets_through(ENGINE, DNS, 53, "UDP")
    assert not world.lets_through(ENGINE, INTERNET, 53, "UDP")
    assert world.lets_through(ROUTER, API_SERVER, 6443)
    assert not world.lets_through(ROUTER, API_SERVER, 443)
    assert not world.lets_through(ROUTER, INTERNET, 6443)


@pytest.mark.parametrize("cidr", [("10.4.0.0/16", True), ("10.5.0.0/16", False)])
def test_prometheus_may_be_given_by_address(cidr: tuple[str, bool]) -> None:
    """It may run outside the cluster."""
    peer = NetworkPeer(cidr=cidr[0])
    context = replace(default_context(), prometheus_peers=(peer,))
    assert _world(_service(), context).lets_through(PROMETHEUS, ENGINE, 9090) is cidr[1]


@pytest.mark.slow
def test_no_peer_of_any_random_service_is_empty() -> None:
    """An empty peer, or a rule in without peers, would let everybody through."""
    context = default_context()
    profile = context.catalog.resolve("cuda")
    for service in random_services(seed=9, count=300):
        for child in desired_children(service, profile, context, replicas=1):
            if child["kind"] != "NetworkPolicy":
                continue
            assert set(child["spec"]["policyTypes"]) == {"Ingress", "Egress"}
            for rule in child["spec"].get("ingress", ()):
                assert rule["from"]
                assert all(rule["from"])
                assert rule["ports"]
            for rule in child["spec"]["egress"]:
                assert rule["ports"]


def test_a_peer_that_names_nobody_is_refused() -> None:
    """Settings that would open a port to everybody are a mistake."""
    with pytest.raises(ValueError, match="CIDR"):
        NetworkPeer()
