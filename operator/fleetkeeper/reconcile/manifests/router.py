"""The router of a service: vllm-router, its ServiceAccount, and a RoleBinding to watch pods."""

from __future__ import annotations

from typing import Final

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH, Component, labels, router_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.quantity import canonical_quantity
from fleetkeeper.api.types import RouterPlacement, RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.digest import template_hash_of
from fleetkeeper.reconcile.manifests.common import (
    HTTP_PORT_NAME,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    SERVING_PORT,
    desired_container_security,
    desired_metadata,
    desired_pod_security,
    desired_pull_secrets,
    desired_scrape_annotations,
    without_empty,
)
from fleetkeeper.reconcile.manifests.rollout import progress_deadline_s

POLICIES = {
    RoutingPolicy.LEAST_LOADED: "power_of_two",
    RoutingPolicy.SESSION_AFFINITY: "consistent_hash",
    RoutingPolicy.PREFIX_AWARE: "cache_aware",
    RoutingPolicy.ROUND_ROBIN: "round_robin",
}
"""The names of the routing policies in vllm-router."""

SPREAD_OVER_NODES: Final[Manifest] = {
    "matchLabelKeys": ["pod-template-hash"],
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
"""A preference, which never delays a pod. Each revision counts alone: otherwise the pods of the old one
could push those of the new one to the same node."""

NOTICE_S = 10
"""Seconds between "not ready" and the end of new connections, in which Service rules update."""


def desired_router_account(service: InferenceService) -> Manifest:
    """Return the ServiceAccount of the router. Only router pods mount its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": desired_metadata(service, router_name(service.name), Component.ROUTER),
        "automountServiceAccountToken": False,
    }


def desired_router_binding(service: InferenceService, context: PlanContext) -> Manifest:
    """Return the RoleBinding that lets the router get, list and watch pods in its own namespace."""
    name = router_name(service.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": desired_metadata(service, name, Component.ROUTER),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": context.router.role_kind,
            "name": context.router.role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.namespace}],
    }


def desired_router_deployment(service: InferenceService, context: PlanContext) -> Manifest:
    """Return the Deployment of the router. A new pod is ready before an old one is removed."""
    template = _template(service, context)
    template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] = template_hash_of(template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": desired_metadata(service, router_name(service.name), Component.ROUTER),
        "spec": {
            "replicas": service.spec.routing.replicas,
            "selector": {"matchLabels": selector(service.name, Component.ROUTER)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "progressDeadlineSeconds": progress_deadline_s(service.spec.rollout),
            "revisionHistoryLimit": 3,
            "template": template,
        },
    }


def desired_router_arguments(service: InferenceService, context: PlanContext) -> list[str]:
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
        f"--request-timeout-secs={context.router.request_timeout_s}",
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
    tokens are more than the KV cache of a replica holds.
    """
    if policy is not RoutingPolicy.PREFIX_AWARE:
        return []
    return [
        "--balance-abs-threshold=8",
        "--balance-rel-threshold=1.5",
        "--max-tree-size=2097152",
        "--eviction-interval-secs=10",
    ]


def _template(service: InferenceService, context: PlanContext) -> Manifest:
    spec: Manifest = {
        "serviceAccountName": router_name(service.name),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": desired_pod_security(context.security),
        "terminationGracePeriodSeconds": service.spec.rollout.drain_seconds + NOTICE_S + 10,
        "topologySpreadConstraints": [
            {
                "labelSelector": {"matchLabels": selector(service.name, Component.ROUTER)},
                **SPREAD_OVER_NODES,
            }
        ],
        **_placement(service.spec.routing.placement),
        "containers": [_container(service, context)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    secrets = desired_pull_secrets(service, context)
    if secrets:
        spec["imagePullSecrets"] = secrets
    return {
        "metadata": {
            "labels": labels(service.name, Component.ROUTER),
            "annotations": desired_scrape_annotations(ROUTER_METRICS_PORT),
        },
        "spec": spec,
    }


def _placement(placement: RouterPlacement) -> Manifest:
    name = placement.priority_class_name
    return without_empty(
        {
            "nodeSelector": dict(placement.node_selector),
            "tolerations": [
                {key: item for key, item in taint.to_manifest().items() if item != ""}
                for taint in placement.tolerations
            ],
            "affinity": placement.affinity.to_manifest(),
            **({"priorityClassName": name} if name else {}),
        }
    )


def _container(service: InferenceService, context: PlanContext) -> Manifest:
    resources = service.spec.routing.resources
    cpu = canonical_quantity(resources.cpu or context.router.cpu)
    memory = canonical_quantity(resources.memory or context.router.memory)
    return {
        "name": "router",
        "image": context.router.image,
        "command": ["vllm-router"],
        "args": desired_router_arguments(service, context),
        "ports": [
            {"name": HTTP_PORT_NAME, "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "limits": {"memory": memory},
            "requests": {"cpu": cpu, "memory": memory},
        },
        "livenessProbe": _probe("/liveness", period_s=10, failures=3),
        "readinessProbe": _probe("/readiness", period_s=2, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": NOTICE_S}}},
        "securityContext": desired_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a volume of the pod
    }


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": HTTP_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
