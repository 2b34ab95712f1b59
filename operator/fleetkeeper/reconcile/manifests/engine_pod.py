"""The pod template of the engines. A change restarts every engine, so golden files pin it."""

from __future__ import annotations

from math import ceil

from fleetkeeper.api.names import (
    ANNOTATION_TEMPLATE_HASH,
    ENGINE_CONTAINER,
    INSTALL_CONTAINER,
    LABEL_SIMULATED,
    Component,
    control_config_name,
    labels,
    selector,
)
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.profile import (
    AcceleratorKind,
    Delivery,
    EffectiveResources,
    EngineProfile,
    effective_resources,
)
from fleetkeeper.api.profiles.strategic_merge import strategic_merge
from fleetkeeper.api.scheduling import Toleration
from fleetkeeper.api.types import DeviceClaim, Placement
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.digest import template_hash_of
from fleetkeeper.reconcile.manifests.common import (
    CONTROL_PORT,
    HTTP_PORT_NAME,
    SERVING_PORT,
    desired_container_security,
    desired_pod_security,
    desired_pull_secrets,
    desired_scrape_annotations,
    without_empty,
)
from fleetkeeper.reconcile.manifests.engine_document import KEYS_DIR
from fleetkeeper.reconcile.manifests.engine_environment import (
    HOME_DIR,
    desired_engine_environment,
)
from fleetkeeper.reconcile.manifests.model_volumes import (
    ModelVolumes,
    desired_model_volumes,
    loaded_model,
)
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning

INSTALL_DIR = "/opt/fleetkeeper"
CONTROL_PORT_NAME = "control"
SUPERVISOR = "fleetkeeper-engine"

STARTUP_PERIOD_S = 3
STARTUP_MARGIN_S = 60
"""The startup probe's time after the supervisor's own deadline, which lets the supervisor report
why the start failed."""
STOP_MARGIN_S = 20
"""The grace period's time in addition to the drain: routers detect "not ready", and vLLM and its
workers end."""
HUNG_GRACE_S = 30
"""The grace period of a pod that failed its liveness probe: it cannot finish its requests."""


def desired_engine_template(
    service: InferenceService,
    profile: EngineProfile,
    context: PlanContext,
    tuning: EngineTuning = AS_SPECIFIED,
) -> Manifest:
    """Return the pod template with its own hash as an annotation.

    Raises:
        EngineOptionRefused: the spec holds options or variables that the profile does not allow.
    """
    spec = service.spec
    template: Manifest = {
        "metadata": {
            "labels": {
                **spec.pod_metadata.labels,
                **labels(service.name, Component.ENGINE),
                **({LABEL_SIMULATED: "true"} if profile.simulated else {}),
            },
            "annotations": {
                **spec.pod_metadata.annotations,
                **desired_scrape_annotations(CONTROL_PORT),
            },
        },
        "spec": _pod_spec(service, profile, context, tuning),
    }
    if profile.pod_template is not None:
        template = strategic_merge(template, profile.pod_template)
    template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] = template_hash_of(template)
    return template


def _pod_spec(
    service: InferenceService, profile: EngineProfile, context: PlanContext, tuning: EngineTuning
) -> Manifest:
    resources = effective_resources(service.spec, profile)
    models = desired_model_volumes(loaded_model(service.spec, profile))
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": desired_pod_security(
            context.security, writes_claims=models.writes_claims
        ),
        "terminationGracePeriodSeconds": service.spec.rollout.drain_seconds + STOP_MARGIN_S,
        "containers": [_engine_container(service, profile, resources, models, tuning)],
        "volumes": _volumes(service, profile, resources, models),
        **_placement(service),
    }
    if profile.delivery is Delivery.INJECT:
        spec["initContainers"] = [_install_container(profile)]
    claims = [_pod_claim(claim) for claim in _claims(service, profile)]
    if claims:
        spec["resourceClaims"] = claims
    if service.spec.service_account_name is not None:
        spec["serviceAccountName"] = service.spec.service_account_name
    secrets = desired_pull_secrets(service, context)
    if secrets:
        spec["imagePullSecrets"] = secrets
    return spec


def _install_container(profile: EngineProfile) -> Manifest:
    """Return the init container that copies the supervisor to a volume for a stock engine image."""
    return {
        "name": INSTALL_CONTAINER,
        "image": profile.injected_image,
        "command": [SUPERVISOR, "install", INSTALL_DIR],
        "resources": {
            "limits": {"cpu": "1", "memory": "256Mi"},
            "requests": {"cpu": "100m", "memory": "256Mi"},
        },
        "securityContext": desired_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "supervisor", "mountPath": INSTALL_DIR}],
    }


def _engine_container(
    service: InferenceService,
    profile: EngineProfile,
    resources: EffectiveResources,
    models: ModelVolumes,
    tuning: EngineTuning,
) -> Manifest:
    supervisor = _supervisor(profile)
    grace_s = service.spec.rollout.drain_seconds + STOP_MARGIN_S
    startup_s = service.spec.rollout.startup_seconds + STARTUP_MARGIN_S
    return {
        "name": ENGINE_CONTAINER,
        "image": profile.image,
        "command": [supervisor],
        "env": desired_engine_environment(service, profile, resources, tuning),
        "ports": [
            {"name": HTTP_PORT_NAME, "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": CONTROL_PORT_NAME, "containerPort": CONTROL_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(service, resources, profile),
        "startupProbe": {
            **_probe("startup", period_s=STARTUP_PERIOD_S),
            "failureThreshold": ceil(startup_s / STARTUP_PERIOD_S),
        },
        "livenessProbe": {
            **_probe("live", period_s=10),
            "failureThreshold": 3,
            "terminationGracePeriodSeconds": min(HUNG_GRACE_S, grace_s),
        },
        "readinessProbe": {**_probe("ready", period_s=2), "failureThreshold": 2},
        "lifecycle": {"preStop": {"exec": {"command": [supervisor, "drain"]}}},
        "securityContext": desired_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(profile, models),
    }


def _supervisor(profile: EngineProfile) -> str:
    return f"{INSTALL_DIR}/bin/{SUPERVISOR}" if profile.delivery is Delivery.INJECT else SUPERVISOR


def _probe(name: str, *, period_s: int) -> Manifest:
    """Return a probe of the supervisor, which responds at once even if vLLM is busy.

    The timeout of 5 s allows for a busy node.
    """
    return {
        "httpGet": {"path": f"/healthz/{name}", "port": CONTROL_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
    }


def _claims(service: InferenceService, profile: EngineProfile) -> tuple[DeviceClaim, ...]:
    """Return the claims of devices, none for a simulated engine."""
    return () if profile.simulated else service.spec.resources.claims


def _pod_claim(claim: DeviceClaim) -> Manifest:
    return {key: item for key, item in claim.to_manifest().items() if key != "request"}


def _container_claim(claim: DeviceClaim) -> Manifest:
    return {key: item for key, item in claim.to_manifest().items() if key in {"name", "request"}}


def _resources(
    service: InferenceService, resources: EffectiveResources, profile: EngineProfile
) -> Manifest:
    """Return requests equal to limits, but without a CPU limit if the pod has an accelerator.

    There, CPU throttling would only slow the engine down, as it would delay the planned steps of a
    simulated engine. Otherwise, on a CPU profile, the cores are the accelerator: with a limit, the
    step time does not depend on other pods of the node, and each further replica adds its full
    capacity.
    """
    requests = {"cpu": resources.cpu, "memory": resources.memory}
    if resources.ephemeral_storage is not None:
        requests["ephemeral-storage"] = resources.ephemeral_storage
    if resources.accelerator is not None:
        requests[resources.accelerator.resource] = str(resources.accelerator.count)
    limits = dict(requests)
    if profile.accelerator is not AcceleratorKind.CPU or profile.simulated:
        del limits["cpu"]
    claims = [_container_claim(claim) for claim in _claims(service, profile)]
    return {"limits": limits, "requests": requests, **({"claims": claims} if claims else {})}


def _volumes(
    service: InferenceService,
    profile: EngineProfile,
    resources: EffectiveResources,
    models: ModelVolumes,
) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "control", "configMap": {"name": control_config_name(service.name)}},
        {"name": "home", "emptyDir": {}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": resources.shared_memory},
        },
        {"name": "tmp", "emptyDir": {}},
    ]
    if profile.delivery is Delivery.INJECT:
        volumes.append({"name": "supervisor", "emptyDir": {}})
    return [*volumes, *models.volumes]


def _mounts(profile: EngineProfile, models: ModelVolumes) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "control", "mountPath": KEYS_DIR, "readOnly": True},
        {"name": "home", "mountPath": HOME_DIR},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - a volume of the pod
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
    ]
    if profile.delivery is Delivery.INJECT:
        mounts.append({"name": "supervisor", "mountPath": INSTALL_DIR, "readOnly": True})
    return [*mounts, *models.mounts]


def _placement(service: InferenceService) -> Manifest:
    placement = service.spec.placement
    names = {
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "schedulerName": placement.scheduler_name,
    }
    return without_empty(
        {
            "nodeSelector": dict(placement.node_selector),
            "tolerations": [_toleration(taint) for taint in placement.tolerations],
            "affinity": placement.affinity.to_manifest(),
            "topologySpreadConstraints": _spread(service.name, placement),
            **{key: name for key, name in names.items() if name},
        }
    )


def _toleration(taint: Toleration) -> Manifest:
    return {key: item for key, item in taint.to_manifest().items() if item != ""}


def _spread(service_name: str, placement: Placement) -> list[Manifest]:
    """Return the spread of the service's engine pods, for each revision separately."""
    return [
        {
            "labelSelector": {"matchLabels": selector(service_name, Component.ENGINE)},
            "matchLabelKeys": ["pod-template-hash"],
            **constraint.to_manifest(),
        }
        for constraint in placement.topology_spread_constraints
    ]
