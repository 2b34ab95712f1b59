"""The names of labels and annotations that services may add to their engine pods (`podMetadata`).

Names are instructions for other programs: to a container runtime, a network plugin, a service mesh
or a webhook that injects secrets. So a service may use only names that are known to be harmless, and
those in the operator's settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

KUBERNETES: Final = "(^|[.])(kubernetes|k8s)[.]io/|^io[.]kubernetes[.]"
"""Names of Kubernetes itself. `io.kubernetes.` is CRI-O. Python and RE2 (CEL) both accept the syntax."""
HARMLESS: Final = (
    # Describe an application to people and tools.
    "app.kubernetes.io/*",
    # Whether the node autoscaler may evict the pod.
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    # What `kubectl rollout restart` writes. Nothing reads it.
    "kubectl.kubernetes.io/restartedAt",
)
"""The names of Kubernetes that services may always use. A trailing `*` stands for a prefix."""
DEFAULT_ALLOWED: Final = ("karpenter.sh/do-not-disrupt", "kueue.x-k8s.io/queue-name")
"""The default of the settings: one keeps a node, one names a queue in the service's own namespace."""

_KUBERNETES = re.compile(KUBERNETES)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return True if a pattern is the name, or ends with `*` and is a prefix of it."""
    return any(
        name.startswith(item[:-1]) if item.endswith("*") else name == item for item in patterns
    )


def is_for_kubernetes(name: str) -> bool:
    """Return True if the name is one of Kubernetes that no service may use."""
    return _KUBERNETES.search(name) is not None and not matches(HARMLESS, name)


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
    """Return True if a service may use the name. `allowed` are the patterns of the settings.

    A name without a domain is allowed if it has no dot: Kata Containers reads
    `io.katacontainers.config.hypervisor.path`.
    """
    if is_for_kubernetes(name):
        return False
    return not ("/" in name or "." in name) or matches((*HARMLESS, *allowed), name)
