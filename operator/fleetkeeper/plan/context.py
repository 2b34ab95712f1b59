"""What every plan may know about the installation: the operator's settings, as one frozen value.

Nothing here comes from a tenant. The runtime builds it from the settings; `fleetkeeper render` and
the tests use `default_context()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from fleetkeeper.api.profile import ProfileCatalog
from fleetkeeper.plan.budget import Budget
from fleetkeeper.plan.profiles import default_catalog

EMPTY_KEYS = '{"keys":[]}'
"""A JWKS without a key: engines serve, and refuse every order."""


@dataclass(frozen=True, slots=True)
class NetworkPeer:
    """Who may talk, or be talked to: pods by labels, or addresses by CIDR.

    With `cidr` set the labels are not used. Without namespace labels the pods are those of the
    service's own namespace; without pod labels they are all pods of the namespaces.
    """

    namespace_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels of the namespace, for example kubernetes.io/metadata.name: monitoring."""
    pod_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels of the pods."""
    cidr: str = ""
    """An address range, for example 10.0.0.0/8."""
    cidr_except: tuple[str, ...] = ()
    """Ranges within `cidr` that are left out."""

    def __post_init__(self) -> None:
        """Refuses a peer without any condition: in a NetworkPolicy it would stand for everybody.

        Raises:
            ValueError: the peer names nobody.
        """
        if not (self.namespace_labels or self.pod_labels or self.cidr):
            raise ValueError(
                "a network peer names nobody: give namespace labels, pod labels or a CIDR"
            )


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """Peers and the ports on which they are reached. No peers: every address; no ports: every port."""

    peers: tuple[NetworkPeer, ...]
    tcp_ports: tuple[int, ...] = ()
    udp_ports: tuple[int, ...] = ()


KUBE_DNS = NetworkRule(
    peers=(
        NetworkPeer(
            namespace_labels=MappingProxyType({"kubernetes.io/metadata.name": "kube-system"}),
            pod_labels=MappingProxyType({"k8s-app": "kube-dns"}),
        ),
        NetworkPeer(cidr="169.254.20.10/32"),
    ),
    tcp_ports=(53,),
    udp_ports=(53,),
)
"""The cluster's own DNS, and the address at which NodeLocal DNSCache answers on each node.

Port 53 of any address would be a way out of the cluster for an engine whose model is hostile.
"""


@dataclass(frozen=True, slots=True)
class PodSecurity:
    """Who the pods run as. None leaves it to the platform (OpenShift assigns a range)."""

    user: int | None = 65532
    """The user id of engine and router pods."""
    group: int | None = 65532
    """Their group id, and that of the files on claims that they write to."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router of each service runs."""

    image: str = "fleetkeeper-router:0.1.0"
    """The image with vllm-router."""
    cpu: str = "250m"
    """Requested cores. No limit: a throttled router delays every request."""
    memory: str = "1Gi"
    """Request and limit. 84 MB at rest, measured; every open request holds its prompt."""
    role_kind: Literal["ClusterRole", "Role"] = "ClusterRole"
    """The kind of the fixed role that lets a router watch the pods of its own namespace."""
    role_name: str = "fleetkeeper-router"
    """Its name."""
    request_timeout_s: int = 3600
    """The longest that one request may take."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The operator-wide inputs of every plan."""

    catalog: ProfileCatalog
    """Engine profiles and aliases."""
    router: RouterSettings = RouterSettings()
    """The router's image, resources and role."""
    security: PodSecurity = PodSecurity()
    """Who pods run as."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets for our own images, expected in each service's namespace, before its own."""
    control_keys: str = EMPTY_KEYS
    """The JWKS (JSON text) with the public control keys that engines trust."""
    operator_namespace: str = "fleetkeeper-system"
    """Where the operator runs."""
    operator_peers: tuple[NetworkPeer, ...] = ()
    """Who may reach the engines' control port to steer them."""
    prometheus_peers: tuple[NetworkPeer, ...] = ()
    """Who scrapes. Empty: nobody may."""
    dns_rule: NetworkRule = KUBE_DNS
    """Where names are resolved."""
    api_server_rule: NetworkRule | None = None
    """Where routers reach the API server. None: any address on ports 443 and 6443."""
    model_hub_rule: NetworkRule | None = None
    """Where engines with an hf:// source download from. None: nowhere but what the profile allows."""
    max_accelerators: int | None = None
    """The GPU budget of all services together. None: no budget."""
    max_accelerators_by_namespace: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """The GPU budget of single namespaces; "*" stands for every namespace not named."""
    floating_revisions: bool = False
    """Whether hf:// models may name a branch or a tag, or nothing, instead of a commit."""
    system_priority_classes: bool = False
    """Whether engine pods may have Kubernetes' own PriorityClasses (system-...)."""

    @property
    def gpu_budget(self) -> Budget:
        """The GPU budget, in all and by namespace."""
        return Budget(self.max_accelerators, self.max_accelerators_by_namespace)


PRIVATE_RANGES = (
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
)
"""Addresses that are never a public model hub; 169.254.169.254 hands out node credentials."""

MODEL_HUB = NetworkRule(
    peers=(
        NetworkPeer(cidr="0.0.0.0/0", cidr_except=PRIVATE_RANGES),
        NetworkPeer(cidr="::/0", cidr_except=("fc00::/7", "fe80::/10")),
    ),
    tcp_ports=(443,),
)
"""The public internet by HTTPS."""


def default_context() -> PlanContext:
    """The context of a chart installed with its defaults: what `fleetkeeper render` shows."""
    return PlanContext(
        catalog=default_catalog(),
        operator_peers=(
            NetworkPeer(
                namespace_labels=MappingProxyType(
                    {"kubernetes.io/metadata.name": "fleetkeeper-system"}
                ),
                pod_labels=MappingProxyType(
                    {
                        "app.kubernetes.io/name": "fleetkeeper",
                        "app.kubernetes.io/component": "operator",
                    }
                ),
            ),
        ),
        prometheus_peers=(
            NetworkPeer(
                namespace_labels=MappingProxyType({"kubernetes.io/metadata.name": "monitoring"})
            ),
        ),
        model_hub_rule=MODEL_HUB,
    )
