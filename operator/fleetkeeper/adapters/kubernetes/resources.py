"""The resources that Fleetkeeper reads or writes, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api import names
from fleetkeeper.reconcile.types import Kind


@dataclass(frozen=True, slots=True)
class Resource:
    """A namespaced resource of the Kubernetes API."""

    kind: str
    plural: str
    version: str
    group: str = ""

    @property
    def api_version(self) -> str:
        """The apiVersion of manifests: `apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, an object, or its subresource. None: all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


INFERENCE_SERVICE = Resource(names.KIND, names.PLURAL, names.VERSION, names.GROUP)
DEPLOYMENT = Resource("Deployment", "deployments", "v1", "apps")
REPLICA_SET = Resource("ReplicaSet", "replicasets", "v1", "apps")
POD = Resource("Pod", "pods", "v1")
EVENT = Resource("Event", "events", "v1")
LEASE = Resource("Lease", "leases", "v1", "coordination.k8s.io")

CHILDREN: dict[Kind, Resource] = {
    Kind.DEPLOYMENT: DEPLOYMENT,
    Kind.SERVICE: Resource("Service", "services", "v1"),
    Kind.SERVICE_ACCOUNT: Resource("ServiceAccount", "serviceaccounts", "v1"),
    Kind.ROLE_BINDING: Resource("RoleBinding", "rolebindings", "v1", "rbac.authorization.k8s.io"),
    Kind.POD_DISRUPTION_BUDGET: Resource(
        "PodDisruptionBudget", "poddisruptionbudgets", "v1", "policy"
    ),
    Kind.CONFIG_MAP: Resource("ConfigMap", "configmaps", "v1"),
    Kind.NETWORK_POLICY: Resource("NetworkPolicy", "networkpolicies", "v1", "networking.k8s.io"),
    Kind.JOB: Resource("Job", "jobs", "v1", "batch"),
}
"""The resource of each kind of child."""

WATCHED: tuple[Resource, ...] = (*CHILDREN.values(), REPLICA_SET, POD)
"""The resources that the reflectors watch, selected by our managed-by label."""


def resource_of(kind: str) -> Resource:
    """Return the resource of a kind that a plan may name: a child's kind, or Pod.

    Raises:
        ValueError: it is any other kind.
    """
    return POD if kind == POD.kind else CHILDREN[Kind(kind)]
