"""The parts of the spec about who connects to the service, and how."""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import LabelKey, Section, StringMap, frozen_map
from fleetkeeper.api.enums import NetworkPreset, ServiceType
from fleetkeeper.api.replica_types import AnnotationValue
from fleetkeeper.api.scheduling import LabelSelector
from fleetkeeper.api.values.form import Form

_CIDR = r"^[0-9A-Fa-f:.]{2,39}/(0|[1-9][0-9]{0,2})$"
Cidr = Annotated[
    str,
    Field(min_length=1, max_length=43),
    Form(
        _CIDR,
        "is not a range of addresses; write ADDRESS/LENGTH, such as 192.0.2.0/24 or 2001:db8::/32",
    ),
]


def network_of(cidr: str) -> IPv4Network | IPv6Network | None:
    """Return the network, None if the text is not one as Kubernetes accepts it.

    Kubernetes refuses IPv4 addresses written as IPv6, and newer versions refuse host bits.
    """
    # Python also accepts netmasks, such as 10.0.0.0/255.0.0.0.
    if re.fullmatch(_CIDR, cidr) is None:
        return None
    try:
        network = ip_network(cidr)
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        return None
    return network


def is_within(inner: str, outer: str) -> bool:
    """Return True if `inner` is a smaller range inside `outer`."""
    part, whole = network_of(inner), network_of(outer)
    if isinstance(part, IPv4Network) and isinstance(whole, IPv4Network):
        return part != whole and part.subnet_of(whole)
    if isinstance(part, IPv6Network) and isinstance(whole, IPv6Network):
        return part != whole and part.subnet_of(whole)
    return False


class NetworkPeer(Section):
    """A set of pods that may connect. At least one of the two selectors is set."""

    pod_selector: LabelSelector | None = Field(
        None,
        description="Pods that may connect. Without namespaceSelector, pods of the service's namespace. Absent means every pod of the selected namespaces.",
    )
    namespace_selector: LabelSelector | None = Field(
        None,
        description="Namespaces of the pods. Absent means the service's namespace. An empty selector selects every namespace.",
    )


class CidrBlock(Section):
    """A range of addresses that may connect."""

    cidr: Cidr = Field(description="Range of addresses, for example 192.0.2.0/24 or 2001:db8::/32.")
    except_: tuple[Cidr, ...] = Field(
        (),
        alias="except",
        max_length=16,
        description="Smaller ranges inside cidr that may not connect.",
    )


class NetworkPolicy(Section):
    """The clients that the NetworkPolicy lets connect: those of the preset, the peers, and the ranges."""

    preset: NetworkPreset = Field(
        NetworkPreset.CLUSTER,
        description="SameNamespace: pods of the service's namespace. Cluster: all pods. Namespaces: pods of the namespaces that namespaceSelector selects. Gateway: only the pods of Fleetkeeper's gateway, in the operator's namespace. See also spec.access.",
    )
    namespace_selector: LabelSelector | None = Field(
        None, description="Namespaces whose pods may connect. Requires preset: Namespaces."
    )
    peers: tuple[NetworkPeer, ...] = Field(
        (), max_length=16, description="Additional pods that may connect."
    )
    cidrs: tuple[CidrBlock, ...] = Field(
        (),
        max_length=16,
        description="Additional ranges of addresses that may connect, for example those of clients outside the cluster.",
    )


class Service(Section):
    """The Kubernetes Service that clients call."""

    type: ServiceType = Field(
        ServiceType.CLUSTER_IP,
        description="ClusterIP: reachable inside the cluster only. NodePort: also at a port of every node. LoadBalancer: also through a load balancer. NodePort and LoadBalancer are allowed only if the operator's settings allow them. Clients outside the cluster also need networkPolicy.cidrs.",
    )
    annotations: StringMap[AnnotationValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Annotations of the Kubernetes Service, for example for a load balancer. The prefix fleetkeeper.io/ and the name app.kubernetes.io/managed-by are reserved.",
    )
    load_balancer_class: LabelKey | None = Field(
        None,
        description="Load balancer implementation. Requires type: LoadBalancer. Absent means the cluster's default. Kubernetes refuses a change while the type is LoadBalancer: set the type to ClusterIP first.",
    )
