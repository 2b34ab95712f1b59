"""What all children share: identity, owner, ports, and the security of their pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleetkeeper.api.names import API_VERSION, KIND, Component, labels
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.plan.context import PlanContext, PodSecurity
from fleetkeeper.plan.model import Manifest

HTTP_PORT_NAME: Final = "http"
"""The name of the port that answers requests, on engines and on routers."""
SERVING_PORT: Final = 8000
"""Where an engine answers requests."""
CONTROL_PORT: Final = 9090
"""Where an engine takes orders and gives its metrics and health."""
ROUTER_PORT: Final = 8080
"""Where a router answers requests."""
ROUTER_METRICS_PORT: Final = 29000
"""Where a router gives its metrics."""


def desired_metadata(service: InferenceService, name: str, component: Component) -> Manifest:
    """Name, namespace, labels and owner of a child.

    The owner reference is by UID, so that the garbage collector removes the children with their
    service and no finalizer is needed. `blockOwnerDeletion` is false: it would need a right on
    finalizers, and a service must never hang on a child.
    """
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": labels(service.name, component),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def desired_scrape_annotations(port: int) -> dict[str, str]:
    """What a Prometheus that discovers pods by annotations needs."""
    return {
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": str(port),
        "prometheus.io/scrape": "true",
    }


def desired_pod_security(security: PodSecurity, *, writes_claims: bool = False) -> Manifest:
    """The pod's security context: never root, the runtime's seccomp profile.

    User and group are left out where the settings name none (OpenShift assigns them). The group of
    the files is set only for pods that write to a claim: on a read-only one it would do nothing.
    """
    context: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if security.user is not None:
        context["runAsUser"] = security.user
    if security.group is not None:
        context["runAsGroup"] = security.group
    if writes_claims and security.group is not None:
        context["fsGroup"] = security.group
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def desired_container_security() -> Manifest:
    """The container's security context: no way to more rights, nothing written to its image."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def desired_pull_secrets(service: InferenceService, context: PlanContext) -> list[Manifest]:
    """The installation's pull secrets, then the service's own, each name once."""
    names = [*context.image_pull_secrets, *(ref.name for ref in service.spec.image_pull_secrets)]
    return [{"name": name} for name in dict.fromkeys(names)]


_MEANT_WHEN_EMPTY: Final = frozenset({"labelSelector", "preference"})
"""An empty label selector selects everything; an absent one nothing."""


def without_empty(written: Mapping[str, object]) -> Manifest:
    """What a user wrote, in the API server's form: entries that are {} or [] left out.

    An empty text stays: as the value of a label it says something.
    """
    kept = {key: _without_empty(item) for key, item in written.items()}
    return {
        key: item
        for key, item in kept.items()
        if item not in ({}, []) or (item == {} and key in _MEANT_WHEN_EMPTY)
    }


def _without_empty(value: object) -> object:
    if isinstance(value, Mapping):
        return without_empty(value)
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
