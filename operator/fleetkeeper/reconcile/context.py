"""The operator's settings as a frozen value: the inputs of every plan from the installation.

No value here comes from a tenant. The runtime builds the context from the settings;
`fleetkeeper render` and the tests use `default_context()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from fleetkeeper.api.profile import ProfileCatalog
from fleetkeeper.common.budget import Budget
from fleetkeeper.reconcile.profiles import default_catalog
from fleetkeeper_contract.version import VERSION

EMPTY_KEYS = '{"keys":[]}'
"""A JWKS without a key: engines serve requests and refuse every limits request."""


@dataclass(frozen=True, slots=True)
class NetworkPeer:
    """A peer of a network rule: pods selected by labels, or addresses by CIDR.

    If `cidr` is set, the labels are ignored. Without namespace labels, the pods are those of the
    service's own namespace. Without pod labels, they are all pods of the selected namespaces.
    """

    namespace_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels of the namespace, for example kubernetes.io/metadata.name: monitoring."""
    pod_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels of the pods."""
    cidr: str = ""
    """An address range, for example 10.0.0.0/8."""
    cidr_except: tuple[str, ...] = ()
    """Ranges within `cidr` that are excluded."""

    def __post_init__(self) -> None:
        """Refuse a peer without a selector: in a NetworkPolicy it would match every peer.

        Raises:
            ValueError: the peer has neither labels nor a CIDR.
        """
        if not (self.namespace_labels or self.pod_labels or self.cidr):
            raise ValueError(
                "a network peer selects nothing: set namespace labels, pod labels or a CIDR"
            )


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """Peers and the ports on which they are reached.

    No peers means every address, no ports means every port.
    """

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
"""The cluster's DNS, and the address on which NodeLocal DNSCache listens on each node.

Port 53 of any address would let an engine with a hostile model send data out of the cluster.
"""


@dataclass(frozen=True, slots=True)
class PodSecurity:
    """The user and group of the pods. None leaves the choice to the platform (as on OpenShift)."""

    user: int | None = 65532
    """The user ID of engine and router pods."""
    group: int | None = 65532
    """The group ID of the pods, and of the files on claims that they write to."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of the router of each service."""

    image: str = f"fleetkeeper-router:{VERSION}"
    """The image that contains vllm-router."""
    cpu: str = "250m"
    """The CPU request. There is no limit, because a throttled router delays every request."""
    memory: str = "1Gi"
    """The memory request and limit. Idle: 84 MB (measured); each open request adds its prompt."""
    role_kind: Literal["ClusterRole", "Role"] = "ClusterRole"
    """The kind of the fixed role that lets a router watch the pods of its own namespace."""
    role_name: str = "fleetkeeper-router"
    """The name of that role."""
    request_timeout_s: int = 3600
    """The maximum duration of one request, in seconds."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The operator-wide inputs of every plan."""

    catalog: ProfileCatalog
    """Engine profiles and aliases."""
    router: RouterSettings = RouterSettings()
    """The router's image, resources and role."""
    security: PodSecurity = PodSecurity()
    """The user and group of the pods."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of pull Secrets, expected in each service's namespace and listed before its own."""
    control_keys: str = EMPTY_KEYS
    """The JWKS (JSON text) with the public control keys that engines trust."""
    operator_namespace: str = "fleetkeeper-system"
    """The namespace of the operator."""
    operator_peers: tuple[NetworkPeer, ...] = ()
    """The peers that may send limits requests to the engines' control port."""
    prometheus_peers: tuple[NetworkPeer, ...] = ()
    """The peers that may scrape metrics. Empty: none."""
    dns_rule: NetworkRule = KUBE_DNS
    """The DNS servers."""
    api_server_rule: NetworkRule | None = None
    """The API server, as routers reach it. None: any address on ports 443 and 6443."""
    model_hub_rule: NetworkRule | None = None
    """The source of hf:// downloads. None: only the addresses that the engine profile allows."""
    max_accelerators: int | None = None
    """The GPU budget of all services together. None: no budget."""
    max_accelerators_by_namespace: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """The GPU budget by namespace; "*" applies to every namespace that is not listed."""
    floating_revisions: bool = False
    """True if hf:// models may name a branch, a tag or no revision instead of a commit."""
    system_priority_classes: bool = False
    """True if engine pods may use Kubernetes' own PriorityClasses (system-...)."""

    @property
    def gpu_budget(self) -> Budget:
        """Return the GPU budget, in total and by namespace."""
        return Budget(self.max_accelerators, self.max_accelerators_by_namespace)


PRIVATE_RANGES = (
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
)
"""Addresses that are never a public model hub. 169.254.169.254 serves node credentials."""

MODEL_HUB = NetworkRule(
    peers=(
        NetworkPeer(cidr="0.0.0.0/0", cidr_except=PRIVATE_RANGES),
        NetworkPeer(cidr="::/0", cidr_except=("fc00::/7", "fe80::/10")),
    ),
    tcp_ports=(443,),
)
"""The public internet over HTTPS."""


def default_context() -> PlanContext:
    """Return the context of a chart with default values, which `fleetkeeper render` uses."""
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
