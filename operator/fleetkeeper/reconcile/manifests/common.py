"""The parts that all children share: identity, owner, ports, and the security of their pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleetkeeper.api.names import API_VERSION, KIND, Component, labels
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext, PodSecurity

HTTP_PORT_NAME: Final = "http"
"""The name of the port for requests, on engines and on routers."""
SERVING_PORT: Final = 8000
"""The port for requests on an engine."""
CONTROL_PORT: Final = 9090
"""The port for limits requests, metrics and health on an engine."""
ROUTER_PORT: Final = 8080
"""The port for requests on a router."""
ROUTER_METRICS_PORT: Final = 29000
"""The port for metrics on a router."""
ROUTER_NOTICE_S: Final = 10
"""Seconds between "not ready" and the end of new connections, in which Service rules update."""


def desired_metadata(service: InferenceService, name: str, component: Component) -> Manifest:
    """Return the name, namespace, labels and owner of a child.

    Because of the owner reference, the garbage collector removes the children with their service,
    and no finalizer is needed. `blockOwnerDeletion` is false: it would require a permission on
    finalizers, and a child must never block the deletion of its service.
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
    """Return the annotations for a Prometheus that discovers pods by annotations."""
    return {
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": str(port),
        "prometheus.io/scrape": "true",
    }


def desired_pod_security(security: PodSecurity, *, writes_claims: bool = False) -> Manifest:
    """Return the pod's security context: not root, with the runtime's default seccomp profile.

    User and group are left out if the settings have none (OpenShift assigns them). `fsGroup` is set
    only for pods that write to a claim, because it has no effect on a read-only one.
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
    """Return the container's security context: no privilege escalation, read-only files."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def desired_pull_secrets(service: InferenceService, context: PlanContext) -> list[Manifest]:
    """Return the installation's pull secrets, then the service's own, each name once."""
    names = [*context.image_pull_secrets, *(ref.name for ref in service.spec.image_pull_secrets)]
    return [{"name": name} for name in dict.fromkeys(names)]


_MEANT_WHEN_EMPTY: Final = frozenset({"labelSelector", "preference"})
"""Keys whose empty value has a meaning: an empty label selector selects all, an absent one none."""


def without_empty(written: Mapping[str, object]) -> Manifest:
    """Return a user's value in the API server's form: without entries that are {} or [].

    Empty strings stay, because they can be label values.
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


def desired_router_probe(path: str, *, period_s: int, failures: int) -> Manifest:
    """Return a probe of a router, at its port for requests."""
    return {
        "httpGet": {"path": path, "port": HTTP_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
