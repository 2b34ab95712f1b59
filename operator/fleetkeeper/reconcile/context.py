"""The operator's settings as a frozen value: the inputs of every plan from the installation.

No value here comes from a tenant. The runtime builds the context from the settings;
`fleetkeeper render` and the tests use `default_context()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, model_validator

from fleetkeeper.api.base import Quantity, Section
from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.api.profiles.metadata_names import DEFAULT_ALLOWED
from fleetkeeper.api.profiles.profile import ProfileCatalog
from fleetkeeper.common.budget import Budget
from fleetkeeper_contract.version import VERSION

EMPTY_KEYS = '{"keys":[]}'
"""A JWKS without a key: engines serve requests and refuse every limits request."""


class NetworkPeer(Section):
    """A source or destination of network traffic, by labels or by addresses.

    Without namespace labels, the pods are those of the service's own namespace. Without pod labels,
    they are all pods of the selected namespaces.
    """

    namespace_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels of the namespace."
    )
    pod_labels: dict[str, str] = Field(default_factory=dict, description="Labels of the pods.")
    cidr: str = Field("", description="Address range. If set, labels are not used.")
    cidr_except: tuple[str, ...] = Field((), description="Ranges in `cidr` to exclude.")

    @model_validator(mode="after")
    def _selects_something(self) -> Self:
        """Refuse a peer without a selector: in a NetworkPolicy it would match every peer."""
        if not (self.namespace_labels or self.pod_labels or self.cidr):
            raise ValueError(
                "a network peer selects nothing: set namespace labels, pod labels or a CIDR"
            )
        return self


class NetworkRule(Section):
    """Peers and their ports. No peers means every address."""

    peers: tuple[NetworkPeer, ...] = Field((), description="Peers; any of them matches.")
    tcp_ports: tuple[int, ...] = Field(
        (), description="TCP ports. Without TCP and UDP ports: every port."
    )
    udp_ports: tuple[int, ...] = Field((), description="UDP ports.")


KUBE_DNS = NetworkRule(
    peers=(
        NetworkPeer(
            namespace_labels={"kubernetes.io/metadata.name": "kube-system"},
            pod_labels={"k8s-app": "kube-dns"},
        ),
        NetworkPeer(cidr="169.254.20.10/32"),
    ),
    tcp_ports=(53,),
    udp_ports=(53,),
)
"""The cluster's DNS, and the address on which NodeLocal DNSCache listens on each node.

Port 53 of any address would let an engine with a hostile model send data out of the cluster.
"""


class PodSecurity(Section):
    """The user and group of engine and router pods. Null on platforms such as OpenShift."""

    user: int | None = Field(
        65532, description="User ID of engine and router pods. Null: chosen by the platform."
    )
    group: int | None = Field(
        65532, description="Group ID of engine and router pods. Null: chosen by the platform."
    )


class RouterSettings(Section):
    """The router of each service."""

    image: str = Field(f"fleetkeeper-router:{VERSION}", description="Image of the router.")
    # There is no limit, because a throttled router delays every request.
    cpu: Quantity = Field("250m", description="CPU request.")
    # 120 MiB with 1,000 streams (measured), and the bodies of requests without an answer so far.
    memory: Quantity = Field("512Mi", description="Memory request and limit.")
    role_kind: Literal["ClusterRole", "Role"] = Field(
        "ClusterRole",
        description="Kind of the fixed role that lets a vllm-router of an earlier release watch its pods.",
    )
    role_name: str = Field("fleetkeeper-router", description="Name of this role.")
    request_timeout_s: int = Field(
        3600, ge=1, description="Maximum time in seconds without a byte of an answer."
    )


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The operator-wide inputs of every plan."""

    catalog: ProfileCatalog
    """Engine profiles and aliases."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """The router's image, resources and role."""
    security: PodSecurity = field(default_factory=PodSecurity)
    """The user and group of the pods."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of pull Secrets, expected in each service's namespace and listed before its own."""
    control_keys: str = EMPTY_KEYS
    """The JWKS (JSON text) with the public control keys that engines trust."""
    grant_keys: str = ""
    """The JWKS (JSON text) with the public keys of the gateway. Empty: no gateway is configured."""
    hold_s: float = 0.0
    """The time in seconds for which the gateway holds requests. 0: no gateway is configured."""
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
    object_storage_rule: NetworkRule | None = None
    """The source of s3:// models. None: public addresses on the port of the profile's endpoint."""
    max_accelerators: int | None = None
    """The GPU budget of all services together. None: no budget."""
    max_accelerators_by_namespace: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """The GPU budget by namespace; "*" applies to every namespace that is not listed."""
    floating_revisions: bool = False
    """True if hf:// models may name a branch, a tag or no revision instead of a commit."""
    system_priority_classes: bool = False
    """True if engine and router pods may use Kubernetes' own PriorityClasses (system-...)."""
    engine_service_accounts: tuple[str, ...] = ()
    """Names of ServiceAccounts that engine pods may use; a trailing `*` allows a prefix."""
    pod_metadata_names: tuple[str, ...] = DEFAULT_ALLOWED
    """Names of labels and annotations that `podMetadata` may have in addition; a trailing `*` allows a prefix."""
    exposed_service_types: tuple[str, ...] = ()
    """The types other than ClusterIP that services may use: NodePort, LoadBalancer."""

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
                namespace_labels={"kubernetes.io/metadata.name": "fleetkeeper-system"},
                pod_labels={
                    "app.kubernetes.io/name": "fleetkeeper",
                    "app.kubernetes.io/component": "operator",
                },
            ),
        ),
        prometheus_peers=(
            NetworkPeer(namespace_labels={"kubernetes.io/metadata.name": "monitoring"}),
        ),
        model_hub_rule=MODEL_HUB,
    )
