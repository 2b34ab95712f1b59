"""The router of a service: Envoy, whose configuration is in the image.

A service that runs the router of an earlier release keeps it until its next rollout (`vllm_router.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleetkeeper.api.names import (
    ANNOTATION_TEMPLATE_HASH,
    Component,
    engines_name,
    labels,
    router_name,
    selector,
)
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RouterPlacement
from fleetkeeper.api.values.quantity import canonical_quantity, parse_quantity
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext, RouterSettings
from fleetkeeper.reconcile.digest import template_hash_of
from fleetkeeper.reconcile.manifests.common import (
    HTTP_PORT_NAME,
    ROUTER_METRICS_PORT,
    ROUTER_NOTICE_S,
    ROUTER_PORT,
    desired_container_security,
    desired_metadata,
    desired_pod_security,
    desired_pull_secrets,
    desired_router_probe,
    desired_scrape_annotations,
    without_empty,
)
from fleetkeeper.reconcile.manifests.rollout import progress_deadline_s
from fleetkeeper.reconcile.manifests.vllm_router import vllm_router_container, vllm_router_pod

SPREAD_OVER_NODES: Final[Manifest] = {
    "matchLabelKeys": ["pod-template-hash"],
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
"""A preference, which never delays a pod. Each revision counts alone: otherwise the pods of the old one
could push those of the new one to the same node."""

COMMAND: Final = "fleetkeeper-router"
FOR_EVER: Final = 1_000_000
"""Failures of a probe: eleven days, within which a service without replicas needs no restart."""
ENVOY: Final = "Envoy"
"""The value of `status.router`. Services with vllm-router have none."""


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one service: its image and resources, and its kind."""

    settings: RouterSettings
    is_vllm_router: bool = False
    """True for the router of an earlier release."""
    watches_pods: bool = False
    """True while pods of an earlier release exist, which need their account and the API server."""


def desired_router_deployment(
    service: InferenceService, context: PlanContext, router: Router, *, is_asleep: bool = False
) -> Manifest:
    """Return the Deployment of the router. A new pod is ready before an old one is removed."""
    template = _template(service, context, router)
    template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] = template_hash_of(template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": desired_metadata(service, router_name(service.name), Component.ROUTER),
        "spec": {
            "replicas": 0 if is_asleep else service.spec.routing.replicas,
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


def _template(service: InferenceService, context: PlanContext, router: Router) -> Manifest:
    spec: Manifest = {
        # The API server keeps the name of an account that a later apply leaves out.
        "serviceAccountName": "default",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": desired_pod_security(context.security),
        "terminationGracePeriodSeconds": service.spec.rollout.drain_seconds + ROUTER_NOTICE_S + 10,
        "topologySpreadConstraints": [
            {
                "labelSelector": {"matchLabels": selector(service.name, Component.ROUTER)},
                **SPREAD_OVER_NODES,
            }
        ],
        **_placement(service.spec.routing.placement),
        "containers": [_container(service, router)],
        **(vllm_router_pod(service) if router.is_vllm_router else {}),
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


def _container(service: InferenceService, router: Router) -> Manifest:
    resources = service.spec.routing.resources
    cpu = canonical_quantity(resources.cpu or router.settings.cpu)
    memory = canonical_quantity(resources.memory or router.settings.memory)
    own = (
        vllm_router_container(service, router.settings)
        if router.is_vllm_router
        else _envoy(service, router.settings, memory)
    )
    return {
        "name": "router",
        "image": router.settings.image,
        "ports": [
            {"name": HTTP_PORT_NAME, "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "limits": {"memory": memory},
            "requests": {"cpu": cpu, "memory": memory},
        },
        "securityContext": desired_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **own,
    }


def _envoy(service: InferenceService, settings: RouterSettings, memory: str) -> Manifest:
    """Return the fields of Envoy's container.

    It starts when an engine is ready for it: a router that reaches none does not replace one that does.
    It has no liveness probe. While it lacks memory it refuses requests, and would be restarted with
    all that run. A thread that hangs ends the process (`watchdogs` of its configuration).
    """
    variables = {
        "DRAIN_SECONDS": service.spec.rollout.drain_seconds,
        "ENGINES": engines_name(service.name),
        "MEMORY_BYTES": int(parse_quantity(memory)),
        "NOTICE_SECONDS": ROUTER_NOTICE_S,
        "POLICY": str(service.spec.routing.policy),
        "REQUEST_TIMEOUT_SECONDS": settings.request_timeout_s,
    }
    return {
        "command": [COMMAND],
        "env": [
            {"name": f"FLEETKEEPER_ROUTER_{name}", "value": str(value)}
            for name, value in variables.items()
        ],
        "lifecycle": {"preStop": {"exec": {"command": [COMMAND, "drain"]}}},
        "startupProbe": desired_router_probe("/startup", period_s=1, failures=FOR_EVER),
        "readinessProbe": desired_router_probe("/readiness", period_s=2, failures=3),
    }
