"""What a node must have to run the replicas of a service, as their pod template says.

The operator reads no Node. So it knows which nodes suit two services only by comparing what both ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The requirements that a scheduler checks for each node."""

    devices: frozenset[str] = frozenset()
    """Names of extended resources, and of claims and their templates."""
    labels: frozenset[tuple[str, str]] = frozenset()
    """The node selector."""
    affinity: str = ""
    """The required node affinity as JSON; empty without one."""
    tolerations: frozenset[str] = frozenset()
    """Each as JSON."""

    def are_met_by_nodes_of(self, other: NodeNeeds) -> bool:
        """Return whether every node that runs replicas of `other` suits these replicas too.

        They do if `other` requires all that these replicas require, and tolerates no taint that these do not.
        """
        return (
            self.devices <= other.devices
            and self.labels <= other.labels
            and self.affinity in ("", other.affinity)
            and self.tolerations >= other.tolerations
        )


ANY_NODE = NodeNeeds()


def node_needs_of(pod_spec: Mapping[str, Any]) -> NodeNeeds:
    """Return the requirements of pods with this spec. What cannot be read is no requirement."""
    affinity = _map(_map(pod_spec.get("affinity")).get("nodeAffinity"))
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return NodeNeeds(
        frozenset(_devices(pod_spec)),
        frozenset(
            (str(name), str(value)) for name, value in _map(pod_spec.get("nodeSelector")).items()
        ),
        _json(required) if required else "",
        frozenset(map(_json, _list(pod_spec.get("tolerations")))),
    )


def _devices(pod_spec: Mapping[str, Any]) -> Iterator[str]:
    for claim in _list(pod_spec.get("resourceClaims")):
        yield from (str(name) for field, name in _map(claim).items() if field != "name")
    for container in _list(pod_spec.get("containers")):
        limits = _map(_map(_map(container).get("resources")).get("limits"))
        yield from (name for name in limits if "/" in name)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
