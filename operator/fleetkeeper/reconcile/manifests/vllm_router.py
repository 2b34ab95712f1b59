"""The router of earlier releases: vllm-router 0.1.17, its ServiceAccount, and a RoleBinding to watch pods.

A service keeps it until the next rollout of its router. Nothing here may change: another pod template
would replace such routers at an upgrade.
"""

from __future__ import annotations

from typing import Final

from fleetkeeper.api.names import Component, router_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import RouterSettings
from fleetkeeper.reconcile.manifests.common import (
    ROUTER_METRICS_PORT,
    ROUTER_NOTICE_S,
    ROUTER_PORT,
    SERVING_PORT,
    desired_metadata,
    desired_router_probe,
)

DEFAULTS: Final = {"cpu": "250m", "memory": "1Gi"}
"""The resources of the charts that installed it."""

POLICIES = {
    RoutingPolicy.LEAST_LOADED: "power_of_two",
    RoutingPolicy.SESSION_AFFINITY: "consistent_hash",
    RoutingPolicy.PREFIX_AWARE: "cache_aware",
    RoutingPolicy.ROUND_ROBIN: "round_robin",
}
"""The names of the routing policies in vllm-router."""


def desired_router_account(service: InferenceService) -> Manifest:
    """Return the ServiceAccount of the router. Only router pods mount its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": desired_metadata(service, router_name(service.name), Component.ROUTER),
        "automountServiceAccountToken": False,
    }


def desired_router_binding(service: InferenceService, settings: RouterSettings) -> Manifest:
    """Return the RoleBinding that lets the router get, list and watch pods in its own namespace."""
    name = router_name(service.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": desired_metadata(service, name, Component.ROUTER),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": settings.role_kind,
            "name": settings.role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.namespace}],
    }


def vllm_router_pod(service: InferenceService) -> Manifest:
    """Return the fields of its pods that other routers do not have."""
    return {
        "serviceAccountName": router_name(service.name),
        "automountServiceAccountToken": True,
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def vllm_router_container(service: InferenceService, settings: RouterSettings) -> Manifest:
    """Return the fields of its container that other routers do not have."""
    return {
        "command": ["vllm-router"],
        "args": _arguments(service, settings),
        "livenessProbe": desired_router_probe("/liveness", period_s=10, failures=3),
        "readinessProbe": desired_router_probe("/readiness", period_s=2, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": ROUTER_NOTICE_S}}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a volume of the pod
    }


def _arguments(service: InferenceService, settings: RouterSettings) -> list[str]:
    """Return the arguments of vllm-router 0.1.17.

    Requests do not wait in the router, where the wait would not be measured: there is no queue, and
    the four tries take a tenth of a second. A crashed engine has the lowest load of all, so a
    request is sent to it repeatedly until the router's circuit breaker opens. It opens at the third
    failure, one less than the number of tries, so the fourth try reaches another engine. After five
    seconds the router tries the engine again. A ready pod is used after its first successful health
    check. A pod that does not respond delays the discovery of the others by at most ten seconds.
    """
    return [
        "--host=0.0.0.0",
        f"--port={ROUTER_PORT}",
        f"--policy={POLICIES[service.spec.routing.policy]}",
        *_prefix_arguments(service.spec.routing.policy),
        "--service-discovery",
        f"--service-discovery-namespace={service.namespace}",
        f"--service-discovery-port={SERVING_PORT}",
        "--selector",
        *(f"{key}={value}" for key, value in selector(service.name, Component.ENGINE).items()),
        "--worker-startup-timeout-secs=10",
        "--worker-startup-check-interval=1",
        "--health-check-interval-secs=5",
        "--health-check-timeout-secs=3",
        "--health-failure-threshold=2",
        "--health-success-threshold=1",
        "--max-concurrent-requests=32768",
        "--queue-size=0",
        "--retry-max-retries=4",
        "--retry-initial-backoff-ms=20",
        "--retry-max-backoff-ms=100",
        "--cb-failure-threshold=3",
        "--cb-success-threshold=1",
        "--cb-timeout-duration-secs=5",
        f"--request-timeout-secs={settings.request_timeout_s}",
        "--max-payload-size=67108864",
        "--prometheus-host=0.0.0.0",
        f"--prometheus-port={ROUTER_METRICS_PORT}",
        "--log-level=info",
    ]


def _prefix_arguments(policy: RoutingPolicy) -> list[str]:
    """Return when the load of replicas decides, not the prefix, and how many prompts are remembered.

    The router's own balance of 64 requests lets a slow replica keep its prefixes until it has 64
    requests more than the others. Its own memory of 32 Mi tokens for each replica takes 300 MiB
    (9 bytes per token, measured), so four replicas would exceed the memory of a router pod. 2 Mi
    tokens exceed a replica's KV cache.
    """
    if policy is not RoutingPolicy.PREFIX_AWARE:
        return []
    return [
        "--balance-abs-threshold=8",
        "--balance-rel-threshold=1.5",
        "--max-tree-size=2097152",
        "--eviction-interval-secs=10",
    ]
