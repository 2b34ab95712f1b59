"""What a node must have to run the replicas of a service, as their pod template says.

The operator reads no Node. So it knows which nodes suit two services only by comparing what both ask for.
"""

from __future__ import annotations

from dataclasses import dataclass


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
