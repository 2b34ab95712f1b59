"""An engine profile's `podTemplate`: what it may add to engine pods, and what Fleetkeeper owns.

Each refusal names the field and what sets it. The check runs when the profiles are loaded.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from fleetkeeper.api.base import LABEL_KEY, LABEL_VALUE
from fleetkeeper.api.names import (
    ANNOTATION_DELETION_COST,
    ENGINE_CONTAINER,
    INSTALL_CONTAINER,
    RESERVED_PREFIXES,
)

_MADE = "is set by Fleetkeeper"


def _of_field(field: str) -> str:
    return f"is set by {field} of services"


def _of_profile(field: str) -> str:
    return f"is set by {field} of the profile"


POD_FIELDS: Final = frozenset(
    [
        "affinity",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "hostAliases",
        "hostNetwork",
        "hostUsers",
        "imagePullSecrets",
        "initContainers",
        "nodeSelector",
        "preemptionPolicy",
        "priorityClassName",
        "readinessGates",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "securityContext",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    ]
)
"""The fields of PodSpec that a podTemplate may set."""

OWNED_POD_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "activeDeadlineSeconds": "would end engines",
        "automountServiceAccountToken": _MADE,
        "enableServiceLinks": _MADE,
        "hostIPC": "would share the engine's memory with the node",
        "hostPID": "changes processes that Fleetkeeper manages",
        "nodeName": "bypasses the scheduler",
        "resourceClaims": _of_field("resources.claims"),
        "resources": "changes the memory from which the memory cap follows",
        "restartPolicy": _MADE,
        "serviceAccount": _of_field("serviceAccountName"),
        "serviceAccountName": _of_field("serviceAccountName"),
        "shareProcessNamespace": "changes processes that Fleetkeeper manages",
        "terminationGracePeriodSeconds": _of_field("rollout.drainSeconds"),
    }
)

ENGINE_FIELDS: Final = frozenset(
    [
        "env",
        "imagePullPolicy",
        "name",
        "ports",
        "resources",
        "securityContext",
        "volumeDevices",
        "volumeMounts",
    ]
)
"""The fields of the engine container that a podTemplate may set."""

OWNED_ENGINE_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "args": f"{_MADE} (use extraArguments of the profile)",
        "command": _MADE,
        "envFrom": "hides the names of variables (use env)",
        "image": _of_profile("image"),
        "lifecycle": _MADE,
        "livenessProbe": _MADE,
        "readinessProbe": _MADE,
        "resizePolicy": "changes the memory from which the memory cap follows",
        "restartPolicy": _MADE,
        "restartPolicyRules": _MADE,
        "startupProbe": _MADE,
        "terminationMessagePath": _MADE,
        "terminationMessagePolicy": _MADE,
        "workingDir": _MADE,
    }
)

OWNED_VARIABLES: Final = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HOME",
        "POD_UID",
        "USER",
    }
)
OWNED_PORTS: Final = frozenset({8000, 9090})
OWNED_PORT_NAMES: Final = frozenset({"http", "control"})
OWNED_ANNOTATIONS: Final = ("prometheus.io/path", "prometheus.io/port", "prometheus.io/scrape")
COMMON_VOLUMES: Final = frozenset({"home", "shared-memory", "tmp"})
"""Fleetkeeper's volumes that every engine pod has and that added containers may mount."""
_OWNED_VOLUME = re.compile(r"cache|control|home|shared-memory|supervisor|tmp|model-(image-)?[0-9]+")
OWNED_PATHS: Final = (
    "/cache",
    "/dev/shm",  # noqa: S108 - a mount of the pod
    "/etc/fleetkeeper",
    "/home/engine",
    "/images",
    "/models",
    "/opt/fleetkeeper",
    "/tmp",  # noqa: S108 - a mount of the pod
)
"""The directories in which Fleetkeeper mounts volumes in the engine container."""
_ACCELERATOR = re.compile(
    r"(nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/|habana\.ai/|google\.com/tpu|aws\.amazon\.com/neuron).*"
)


def pod_template_errors(
    template: Mapping[str, Any], *, variables: Collection[str], accelerator: str
) -> list[str]:
    """Return what a podTemplate in stored form must not set, one line for each error.

    `variables` and `accelerator` are what the profile itself sets: the names of its environment
    variables, and its extended resource.
    """
    found = [*_unknown("podTemplate", template, {"metadata", "spec"}, {})]
    found += _metadata(_map(template, "metadata"))
    spec = _map(template, "spec")
    found += _unknown("podTemplate.spec", spec, POD_FIELDS, OWNED_POD_FIELDS)
    found += _volumes(_items(spec, "volumes"))
    mountable = COMMON_VOLUMES | {str(item["name"]) for item in _items(spec, "volumes")}
    for kind in ("initContainers", "containers"):
        for container in _items(spec, kind):
            path = f"podTemplate.spec.{kind}[{container['name']}]"
            found += _container(path, kind, container, variables)
            found += _resources(f"{path}.resources", container, accelerator)
            found += _mounts(path, container, mountable)
    return found + _repeated_names(spec)


def extended_resources(template: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the extended resources that a podTemplate adds to any container."""
    containers = [*containers_of(template, "initContainers"), *containers_of(template)]
    return frozenset(
        name
        for container in containers
        for amounts in _map(container, "resources").values()
        if isinstance(amounts, Mapping)
        for name in amounts
        if "/" in name
    )


def engine_variables(template: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the variables that a podTemplate sets in the engine container."""
    engines = [item for item in containers_of(template) if item["name"] == ENGINE_CONTAINER]
    return frozenset(str(entry["name"]) for item in engines for entry in _items(item, "env"))


def containers_of(
    template: Mapping[str, Any], kind: str = "containers"
) -> Sequence[Mapping[str, Any]]:
    """Return the containers of a valid podTemplate."""
    return _items(_map(template, "spec"), kind)


def _map(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key, {})
    return value if isinstance(value, Mapping) else {}


def _items(parent: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = parent.get(key, [])
    return value if isinstance(value, list) else []


def _unknown(
    path: str, part: Mapping[str, Any], allowed: Collection[str], owned: Mapping[str, str]
) -> Iterator[str]:
    for key in part:
        if key in owned:
            yield f"{path}.{key} {owned[key]}; remove it"
        elif key not in allowed:
            yield f"{path}.{key} is not supported; it may have {', '.join(sorted(allowed))}"
    for key in ("metadata", "spec", "labels", "annotations", "securityContext", "resources"):
        if key in part and not isinstance(part[key], Mapping):
            yield f"{path}.{key} must be a map"


def _metadata(metadata: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("podTemplate.metadata", metadata, {"annotations", "labels"}, {})
    for kind in ("labels", "annotations"):
        for name, value in _map(metadata, kind).items():
            path = f"podTemplate.metadata.{kind}.{name}"
            owned = (*OWNED_ANNOTATIONS, ANNOTATION_DELETION_COST, "pod-template-hash")
            if name.startswith(RESERVED_PREFIXES) or name in owned:
                yield f"{path} {_MADE}; remove it"
            elif not re.fullmatch(LABEL_KEY, name):
                yield f"{path} is not a valid name of a label or annotation"
            elif kind == "labels" and (len(value) > 63 or not re.fullmatch(LABEL_VALUE, value)):
                yield f"{path} is not a valid value of a label"


def _volumes(volumes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for volume in volumes:
        path = f"podTemplate.spec.volumes[{volume['name']}]"
        if _OWNED_VOLUME.fullmatch(volume["name"]):
            yield f"{path} has the name of a volume of Fleetkeeper; choose another name"
        elif len(volume) != 2:
            yield f"{path} must have a name and one source"


def _container(
    path: str, kind: str, container: Mapping[str, Any], variables: Collection[str]
) -> Iterator[str]:
    name = container["name"]
    is_engine = name == ENGINE_CONTAINER and kind == "containers"
    if name == INSTALL_CONTAINER or (name == ENGINE_CONTAINER and not is_engine):
        yield f"{path} has the name of a container of Fleetkeeper; choose another name"
        return
    if is_engine:
        yield from _unknown(path, container, ENGINE_FIELDS, OWNED_ENGINE_FIELDS)
        yield from _engine_paths(path, container)
    elif not isinstance(container.get("image"), str):
        yield f"{path} has no image; add it"
    for entry in _items(container, "env"):
        owned = _variable(entry["name"], variables if is_engine else None)
        if owned:
            yield f"{path}.env[{entry['name']}] {owned}; remove it"
        elif not isinstance(entry.get("value", ""), str):
            yield f"{path}.env[{entry['name']}].value is not a string; put it in quotes"
    for port in _items(container, "ports"):
        if port["containerPort"] in OWNED_PORTS or port.get("name") in OWNED_PORT_NAMES:
            yield f"{path}.ports[{port['containerPort']}] has the number or name of a port of the engine; choose another"


def _variable(name: str, variables: Collection[str] | None) -> str:
    """Return why a variable is owned, "" if it is not. `variables` is None for other containers."""
    if name.startswith("FLEETKEEPER_") or (variables is not None and name in OWNED_VARIABLES):
        return _MADE
    return _of_profile("variables") if variables is not None and name in variables else ""


def _engine_paths(path: str, container: Mapping[str, Any]) -> Iterator[str]:
    for mount in _items(container, "volumeMounts"):
        place = posixpath.normpath(f"/{mount['mountPath'].lstrip('/')}")
        for owned in OWNED_PATHS:
            if posixpath.commonpath([place, owned]) in {place, owned}:
                yield f"{path}.volumeMounts[{mount['mountPath']}] overlaps {owned}, which Fleetkeeper mounts; choose another path"


def _mounts(path: str, container: Mapping[str, Any], mountable: Collection[str]) -> Iterator[str]:
    for kind, key in (("volumeMounts", "mountPath"), ("volumeDevices", "devicePath")):
        for mount in _items(container, kind):
            where = f"{path}.{kind}[{mount[key]}]"
            if not mount[key].startswith("/"):
                yield f"{where} is not an absolute path"
            if mount.get("name") not in mountable:
                yield f"{where} names no volume of podTemplate; it may name {', '.join(sorted(mountable))}"


def _resources(path: str, container: Mapping[str, Any], accelerator: str) -> Iterator[str]:
    """Refuse accelerators, which the GPU budget counts, and what determines the memory cap."""
    is_engine = container["name"] == ENGINE_CONTAINER
    for kind, amounts in _map(container, "resources").items():
        if is_engine and kind == "claims":
            yield f"{path}.claims {_of_field('resources.claims')}; remove it"
        if kind not in {"limits", "requests"} or not isinstance(amounts, Mapping):
            continue
        for name in amounts:
            if name == accelerator or _ACCELERATOR.fullmatch(name):
                yield f"{path}.{kind}.{name} {_of_field('resources.accelerator')}; remove it"
            elif is_engine and "/" not in name and not name.startswith("hugepages-"):
                yield f"{path}.{kind}.{name} {_of_field('resources')}; remove it"


def _repeated_names(spec: Mapping[str, Any]) -> list[str]:
    first = {item["name"] for item in _items(spec, "initContainers")}
    return [
        f"podTemplate.spec.containers[{item['name']}] has the name of an init container; choose another name"
        for item in _items(spec, "containers")
        if item["name"] in first
    ]
