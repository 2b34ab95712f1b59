"""The Job that downloads a new model into the cache before the engines are replaced.

Its pod is the engines' own: the same image, variables, security, identity and nodes, with neither
accelerators nor what others added to the pod, and with a command that ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fleetkeeper.api.names import (
    ENGINE_CONTAINER,
    INSTALL_CONTAINER,
    Component,
    labels,
    prefetch_name,
)
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import Model
from fleetkeeper.common.budget import ACCELERATORS_VARIABLE, OTHER_DEVICES_VARIABLE
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.common import desired_metadata
from fleetkeeper.reconcile.manifests.model_volumes import HUB_SCHEME

ATTEMPTS_AFTER_FIRST = 3
STOP_S = 10
"""The grace period of the pod: an ended download continues at the next attempt."""
NO_SUCH_COMMAND = 2
"""The exit code of an engine image that is too old for the command: it cannot download beforehand."""
NO_DEVICES = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
"""Images of CUDA ask for all devices, which some container runtimes grant without a request."""
RESOURCES = {
    "limits": {"cpu": "2", "memory": "2Gi"},
    "requests": {"cpu": "250m", "memory": "512Mi"},
}
_DEVICE_VARIABLES = frozenset({ACCELERATORS_VARIABLE, OTHER_DEVICES_VARIABLE, NO_DEVICES["name"]})
_CONTAINER_KEYS = ("name", "image", "imagePullPolicy", "securityContext")
_POD_KEYS = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
)


def shares_cache(model: Model | None) -> bool:
    """Return True if the model is downloaded into a claim, which all replicas share."""
    if model is None or model.cache is None or model.cache.claim_name is None:
        return False
    return model.source.startswith(HUB_SCHEME)


def desired_prefetch_job(service: InferenceService, template: Manifest) -> Manifest:
    """Return the Job that downloads the models of this pod template of the engines."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": desired_metadata(service, prefetch_name(service.name), Component.PREFETCH),
        "spec": {
            "activeDeadlineSeconds": service.spec.rollout.startup_seconds,
            "backoffLimit": ATTEMPTS_AFTER_FIRST,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": ENGINE_CONTAINER,
                            "operator": "In",
                            "values": [NO_SUCH_COMMAND],
                        },
                    }
                ]
            },
            "template": {
                "metadata": {"labels": _labels(service, template)},
                "spec": _pod_spec(template["spec"]),
            },
        },
    }


def _labels(service: InferenceService, template: Manifest) -> Manifest:
    """Return the labels of the engine pods, such as those for workload identity, as another component."""
    found = dict(template["metadata"].get("labels") or {})
    return {**found, **labels(service.name, Component.PREFETCH)}


def _pod_spec(engine: Mapping[str, Any]) -> Manifest:
    container = _named(engine.get("containers"), ENGINE_CONTAINER)
    kept = [_download_container(item) for item in container]
    install = _named(engine.get("initContainers"), INSTALL_CONTAINER)
    used = {mount["name"] for item in (*kept, *install) for mount in item["volumeMounts"]}
    nodes = (engine.get("affinity") or {}).get("nodeAffinity")
    spec: Manifest = {
        **{key: engine[key] for key in _POD_KEYS if key in engine},
        **({"affinity": {"nodeAffinity": nodes}} if nodes else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_S,
        "containers": kept,
        "volumes": [item for item in engine.get("volumes") or () if item["name"] in used],
    }
    return {**spec, "initContainers": install} if install else spec


def _named(containers: Iterable[Mapping[str, Any]] | None, name: str) -> list[Manifest]:
    return [dict(item) for item in containers or () if item.get("name") == name]


def _download_container(engine: Mapping[str, Any]) -> Manifest:
    env = [item for item in engine.get("env") or () if item["name"] not in _DEVICE_VARIABLES]
    return {
        **{key: engine[key] for key in _CONTAINER_KEYS if key in engine},
        "command": [*engine["command"], "fetch"],
        "env": sorted([*env, NO_DEVICES], key=lambda item: str(item["name"])),
        "resources": RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": list(engine.get("volumeMounts") or ()),
        **({"envFrom": engine["envFrom"]} if engine.get("envFrom") else {}),
    }
