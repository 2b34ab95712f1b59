"""The rules of the sections about who connects to the service, and how."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from fleetkeeper.api import network_types as n
from fleetkeeper.api.enums import NetworkPreset, ServiceType
from fleetkeeper.api.schema.rule import Rule, label_keys_rule, unreserved_keys_rule

_IS_NETWORK = "isCIDR({0}) && cidr({0}) == cidr({0}).masked()"

NETWORK_RULES: dict[type[BaseModel], tuple[Rule[Any], ...]] = {
    n.NetworkPeer: (
        Rule[n.NetworkPeer](
            "",
            "has(self.podSelector) || has(self.namespaceSelector)",
            lambda of: of.pod_selector is not None or of.namespace_selector is not None,
            "set podSelector, namespaceSelector, or both; a peer without a selector would be every pod",
        ),
    ),
    n.CidrBlock: (
        Rule[n.CidrBlock](
            "cidr",
            _IS_NETWORK.format("self.cidr"),
            lambda of: n.network_of(of.cidr) is not None,
            "must be a range of addresses whose host bits are 0, such as 192.0.2.0/24 or 2001:db8::/32",
        ),
        Rule[n.CidrBlock](
            "except",
            f"!isCIDR(self.cidr) || self.except.all(e, {_IS_NETWORK.format('e')} && "
            "cidr(self.cidr).containsCIDR(e) && cidr(e).prefixLength() > cidr(self.cidr).prefixLength())",
            lambda of: (
                n.network_of(of.cidr) is None or all(n.is_within(e, of.cidr) for e in of.except_)
            ),
            "must be smaller ranges inside cidr whose host bits are 0, such as 192.0.2.64/26 in 192.0.2.0/24",
        ),
    ),
    n.Service: (
        label_keys_rule("annotations", "annotations"),
        unreserved_keys_rule("annotations"),
        Rule[n.Service](
            "loadBalancerClass",
            "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
            lambda of: of.load_balancer_class is None or of.type is ServiceType.LOAD_BALANCER,
            "only type: LoadBalancer has a loadBalancerClass; remove it or change the type",
        ),
    ),
    n.NetworkPolicy: (
        Rule[n.NetworkPolicy](
            "namespaceSelector",
            "(self.preset == 'Namespaces') == has(self.namespaceSelector)",
            lambda of: (
                (of.preset is NetworkPreset.NAMESPACES) == (of.namespace_selector is not None)
            ),
            "preset: Namespaces requires a namespaceSelector; other presets do not allow one",
        ),
    ),
}
