"""What a set of NetworkPolicies lets through: a pure evaluator of networking.k8s.io/v1.

A pod that a policy of a direction selects is closed in that direction, but for what the rules of all
such policies allow together. A connection needs both: out of its source and into its destination.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """A pod, or an address outside the cluster (without a namespace)."""

    ip: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class World:
    """Namespaces with their labels, and the policies."""

    namespaces: Mapping[str, Mapping[str, str]]
    policies: tuple[dict[str, Any], ...]

    def lets_through(
        self, source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP"
    ) -> bool:
        """Whether a connection from `source` to that port of `target` comes about."""
        return self._allows("Egress", source, target, port, protocol) and self._allows(
            "Ingress", target, source, port, protocol
        )

    def _allows(
        self, direction: str, pod: Endpoint, other: Endpoint, port: int, protocol: str
    ) -> bool:
        policies = [policy for policy in self.policies if _applies(policy, pod, direction)]
        if not policies:
            return True
        rules_key, peers_key = ("egress", "to") if direction == "Egress" else ("ingress", "from")
        return any(
            self._peers_match(rule.get(peers_key), other, policy["metadata"]["namespace"])
            and _port_matches(rule.get("ports"), port, protocol)
            for policy in policies
            for rule in policy["spec"].get(rules_key) or ()
        )

    def _peers_match(
        self, peers: Iterable[dict[str, Any]] | None, other: Endpoint, own_namespace: str
    ) -> bool:
        """No peers means everybody."""
        return not peers or any(self._peer_matches(peer, other, own_namespace) for peer in peers)

    def _peer_matches(self, peer: dict[str, Any], other: Endpoint, own_namespace: str) -> bool:
        if "ipBlock" in peer:
            return _in_block(peer["ipBlock"], other.ip)
        if not other.namespace:
            return False
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], self.namespaces[other.namespace]):
                return False
        elif other.namespace != own_namespace:
            return False
        return "podSelector" not in peer or selects(peer["podSelector"], other.labels)


def _applies(policy: dict[str, Any], pod: Endpoint, direction: str) -> bool:
    return (
        policy["metadata"]["namespace"] == pod.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    )


def selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects these labels; an empty one selects everything."""
    by_name = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in by_name.items()) and all(
        _requirement_holds(requirement, labels)
        for requirement in selector.get("matchExpressions") or ()
    )


def _requirement_holds(requirement: dict[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = requirement["key"], requirement.get("values") or ()
    return {
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
    }[requirement["operator"]]


def _in_block(block: dict[str, Any], ip: str) -> bool:
    address = ip_address(ip)
    return address in ip_network(block["cidr"]) and not any(
        address in ip_network(left_out) for left_out in block.get("except") or ()
    )


def _port_matches(ports: Iterable[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    """No ports means every port."""
    return not ports or any(
        entry.get("protocol", "TCP") == protocol
        and entry["port"] <= port <= entry.get("endPort", entry["port"])
        for entry in ports
    )
