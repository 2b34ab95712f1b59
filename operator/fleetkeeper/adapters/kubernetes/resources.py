"""The resources that the operator reads or writes."""

from __future__ import annotations

from fleetkeeper.api import names
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.resource import Resource

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
