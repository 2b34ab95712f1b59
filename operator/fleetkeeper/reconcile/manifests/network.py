"""NetworkPolicies: one for the engines, one for the router, one for the download of a new model.

vLLM's own port has unauthenticated routes (weights, pausing), and torch listens on every address.
Therefore only the router can reach an engine, and only the router, the operator and Prometheus its
control port. A rule without peers would allow everyone, so such a rule is omitted, never written empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetkeeper.api.names import (
    Component,
    engine_policy_name,
    prefetch_name,
    router_policy_name,
    selector,
)
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.profiles.tracing import Tracing
from fleetkeeper.api.scheduling import LabelSelector
from fleetkeeper.api.types import NetworkPeer as ClientPeer
from fleetkeeper.api.types import NetworkPreset, RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import (
    MODEL_HUB,
    NetworkPeer,
    NetworkRule,
    PlanContext,
)
from fleetkeeper.reconcile.manifests.common import (
    CONTROL_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    SERVING_PORT,
    desired_metadata,
    without_empty,
)
from fleetkeeper.reconcile.manifests.model_volumes import downloads, loaded_model, streams
from fleetkeeper_contract.grants import GATEWAY_POD_LABELS, USAGE_POD_LABELS

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
"""Set by the API server on every namespace."""

_EVERY_NAMESPACE: Manifest = {
    "namespaceSelector": {"matchExpressions": [{"key": NAMESPACE_NAME_LABEL, "operator": "Exists"}]}
}


def desired_engine_policy(
    service: InferenceService,
    profile: EngineProfile,
    context: PlanContext,
    *,
    admits_clients: bool = False,
) -> Manifest:
    """Return the NetworkPolicy of the engines.

    Ingress: requests and questions whether it is ready from the router (without a router: requests from
    the clients in `networkPolicy`), limits requests from the operator, scrapes, and reads of usage if there
    is a gateway. `admits_clients`: requests from the clients too, beside a router.

    Egress: DNS, the peers that the profile allows, the profile's collector of traces, the model hub if
    there is an hf:// source, and object storage if there is an s3:// source.
    """
    is_routed = service.spec.routing.policy is not RoutingPolicy.NONE
    clients = [_own_pods(service, Component.ROUTER)] if is_routed else []
    if admits_clients or not is_routed:
        clients += _clients(service, context)
    steering = _peers((*context.operator_peers, *context.prometheus_peers))
    if is_routed:
        steering.append(_own_pods(service, Component.ROUTER))
    if context.grant_keys:
        steering.append(_of_gateway(USAGE_POD_LABELS, context))
    return _policy(
        service,
        engine_policy_name(service.name),
        Component.ENGINE,
        ingress=[_from(clients, SERVING_PORT), _from(steering, CONTROL_PORT)],
        egress=_engine_egress(service, profile, context),
    )


def desired_prefetch_policy(
    service: InferenceService, profile: EngineProfile, context: PlanContext
) -> Manifest:
    """Return the NetworkPolicy of the Job that downloads a model: no ingress, the engines' egress."""
    return _policy(
        service,
        prefetch_name(service.name),
        Component.PREFETCH,
        ingress=[],
        egress=_engine_egress(service, profile, context),
    )


def _engine_egress(
    service: InferenceService, profile: EngineProfile, context: PlanContext
) -> list[Manifest]:
    """Return the peers of the profile and of the model, and DNS to find them.

    A simulated engine loads no model, so without a peer of its profile it connects nowhere.
    """
    egress = [
        {"to": [{"ipBlock": {"cidr": peer.cidr}}], "ports": _ports(peer.ports)}
        for peer in profile.egress
    ]
    if profile.tracing is not None:
        egress.append(_collector_rule(profile.tracing))
    model = loaded_model(service.spec, profile)
    if context.model_hub_rule is not None and downloads(model):
        egress.append(_rule(context.model_hub_rule))
    if profile.object_storage is not None and streams(model):
        egress.append(_rule(_object_storage_rule(profile.object_storage, context)))
    return [] if profile.simulated and not egress else [_rule(context.dns_rule), *egress]


def desired_router_policy(
    service: InferenceService, context: PlanContext, *, watches_pods: bool = False
) -> Manifest:
    """Return the NetworkPolicy of the router.

    Ingress: requests from the clients in `networkPolicy`, and scrapes. Egress: DNS, this service's
    engines, and for routers that watch pods the API server.
    """
    egress = [
        _rule(context.dns_rule),
        {
            "to": [_own_pods(service, Component.ENGINE)],
            "ports": _ports((SERVING_PORT, CONTROL_PORT)),
        },
    ]
    if watches_pods:
        egress.append(
            _rule(context.api_server_rule or NetworkRule(peers=(), tcp_ports=(443, 6443)))
        )
    return _policy(
        service,
        router_policy_name(service.name),
        Component.ROUTER,
        ingress=[
            _from(_clients(service, context), ROUTER_PORT),
            _from(_peers(context.prometheus_peers), ROUTER_METRICS_PORT),
        ],
        egress=egress,
    )


def _object_storage_rule(storage: ObjectStorage, context: PlanContext) -> NetworkRule:
    """Return the rule of the settings, or the public addresses on the port of the endpoint."""
    return context.object_storage_rule or MODEL_HUB.model_copy(
        update={"tcp_ports": (storage.port,)}
    )


def _policy(
    service: InferenceService,
    name: str,
    component: Component,
    *,
    ingress: Iterable[Manifest | None],
    egress: Iterable[Manifest],
) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(service.name, component)},
        "policyTypes": ["Ingress", "Egress"],
    }
    # The API server drops an empty list, and a second apply of one would change the object again.
    if outward := list(egress):
        spec["egress"] = outward
    allowed = [rule for rule in ingress if rule is not None]
    if allowed:
        spec["ingress"] = allowed
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": desired_metadata(service, name, component),
        "spec": spec,
    }


def _clients(service: InferenceService, context: PlanContext) -> list[Manifest]:
    """Return the clients in `networkPolicy`: those of the preset, the peers, and the ranges."""
    policy = service.spec.network_policy
    blocks = [block.to_manifest() for block in policy.cidrs]
    return [
        *_preset_peers(service, context),
        *(_client(peer, service.namespace) for peer in policy.peers),
        *({"ipBlock": without_empty(block)} for block in blocks),
    ]


def _preset_peers(service: InferenceService, context: PlanContext) -> list[Manifest]:
    policy = service.spec.network_policy
    if policy.preset is NetworkPreset.SAME_NAMESPACE:
        return [_namespace(service.namespace)]
    if policy.preset is NetworkPreset.CLUSTER:
        return [_EVERY_NAMESPACE]
    if policy.preset is NetworkPreset.GATEWAY:
        return [_of_gateway(GATEWAY_POD_LABELS, context)]
    chosen = policy.namespace_selector
    return [] if chosen is None else [_namespaces(chosen)]


def _of_gateway(labels: Mapping[str, str], context: PlanContext) -> Manifest:
    """Return pods of the gateway, which runs in the operator's namespace."""
    return {
        **_namespace(context.operator_namespace),
        "podSelector": {"matchLabels": dict(labels)},
    }


def _client(peer: ClientPeer, own_namespace: str) -> Manifest:
    """Return the peer. An empty selector is written as what it selects, never as {}.

    Digests ignore {}, so a removal of `podSelector: {}` would stay unnoticed.
    """
    of, pods = peer.namespace_selector, peer.pod_selector
    chosen = without_empty(pods.to_manifest()) if pods else {}
    if of is not None:
        return {**_namespaces(of), **({"podSelector": chosen} if chosen else {})}
    return {"podSelector": chosen} if chosen else _namespace(own_namespace)


def _namespaces(chosen: LabelSelector) -> Manifest:
    written = without_empty(chosen.to_manifest())
    return {"namespaceSelector": written} if written else _EVERY_NAMESPACE


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: name}}}


def _own_pods(service: InferenceService, component: Component) -> Manifest:
    return {"podSelector": {"matchLabels": selector(service.name, component)}}


def _peers(peers: Iterable[NetworkPeer]) -> list[Manifest]:
    return [_peer(peer) for peer in peers]


def _peer(peer: NetworkPeer) -> Manifest:
    if peer.cidr:
        block: Manifest = {"cidr": peer.cidr}
        if peer.cidr_except:
            block["except"] = list(peer.cidr_except)
        return {"ipBlock": block}
    chosen: Manifest = {}
    if peer.namespace_labels:
        chosen["namespaceSelector"] = {"matchLabels": dict(sorted(peer.namespace_labels.items()))}
    if peer.pod_labels:
        chosen["podSelector"] = {"matchLabels": dict(sorted(peer.pod_labels.items()))}
    return chosen


def _from(peers: list[Manifest], port: int) -> Manifest | None:
    return {"from": peers, "ports": _ports((port,))} if peers else None


def _rule(rule: NetworkRule) -> Manifest:
    """Return an egress rule. Without peers it allows every address on its ports."""
    written: Manifest = {}
    if rule.peers:
        written["to"] = _peers(rule.peers)
    if rule.tcp_ports or rule.udp_ports:
        written["ports"] = _ports(rule.tcp_ports, rule.udp_ports)
    return written


def _collector_rule(tracing: Tracing) -> Manifest:
    of = tracing.collector
    peer = NetworkPeer(
        namespace_labels=dict(of.namespace_labels),
        pod_labels=dict(of.pod_labels),
        cidr=of.cidr or "",
    )
    return _rule(NetworkRule(peers=(peer,), tcp_ports=(tracing.collector_port,)))


def _ports(tcp: Iterable[int], udp: Iterable[int] = ()) -> list[Manifest]:
    return [{"port": port, "protocol": "TCP"} for port in tcp] + [
        {"port": port, "protocol": "UDP"} for port in udp
    ]
