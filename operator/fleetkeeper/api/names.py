"""The names that Fleetkeeper uses: API names, labels, annotations, and names of child objects.

Do not change labels or names of child objects: that would orphan objects of an older version.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

GROUP: Final = "fleetkeeper.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceService"
LIST_KIND: Final = "InferenceServiceList"
PLURAL: Final = "inferenceservices"
SINGULAR: Final = "inferenceservice"
SHORT_NAME: Final = "fis"
CRD_NAME: Final = f"{PLURAL}.{GROUP}"

UNWRITTEN_STATUS: Final[Mapping[str, int]] = MappingProxyType({"observedGeneration": 0})
"""The schema's default for a status that was never written. Without one, Flux takes a new service as ready."""

FIELD_MANAGER: Final = "fleetkeeper"
"""The field manager of every server-side apply."""

LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "fleetkeeper"
"""The value of `LABEL_MANAGED_BY` on every child object."""
LABEL_SERVICE: Final = "fleetkeeper.io/service"
LABEL_COMPONENT: Final = "fleetkeeper.io/component"
LABEL_SIMULATED: Final = "fleetkeeper.io/simulated"
"""The label of engine pods that simulate vLLM."""

ANNOTATION_TEMPLATE_HASH: Final = "fleetkeeper.io/template-hash"
"""The hash of the engine's pod template without this annotation."""
ANNOTATION_WAKE: Final = "fleetkeeper.io/wake"
"""The annotation that wakes a service by hand. Its value is the number of the sleep to end."""
ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""A Kubernetes annotation: a scale-down removes the pod with the lowest cost first."""

RESERVED_PREFIXES: Final = ("fleetkeeper.io/", "app.kubernetes.io/managed-by")
"""Prefixes of label and annotation names that `podMetadata` must not contain."""

NAME_MAX_LENGTH: Final = 50
"""The maximum length of a service name: with the longest child suffix it fits a label's 63 characters."""
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
CHILD_INFIX: Final = "-fk-"
"""The text between the service name and the child suffix. Service names must not contain it."""


ENGINE_CONTAINER: Final = "engine"
INSTALL_CONTAINER: Final = "install"


class Component(StrEnum):
    """The values of the component label. Do not change them: immutable selectors contain them."""

    ENGINE = "engine"
    ROUTER = "router"
    CONTROL = "control"
    PREFETCH = "prefetch"


def engine_name(service: str) -> str:
    """Return the name of the engine Deployment."""
    return service


def address_name(service: str) -> str:
    """Return the name of the Kubernetes Service that clients call."""
    return service


def engines_name(service: str) -> str:
    """Return the name of the headless Service with the addresses of all engines."""
    return f"{service}{CHILD_INFIX}engines"


def router_name(service: str) -> str:
    """Return the name of all objects of the router, such as its Deployment and ServiceAccount."""
    return f"{service}{CHILD_INFIX}router"


def disruption_name(service: str) -> str:
    """Return the name of the PodDisruptionBudget of the engines."""
    return f"{service}{CHILD_INFIX}engine"


def engine_policy_name(service: str) -> str:
    """Return the name of the NetworkPolicy of the engines."""
    return f"{service}{CHILD_INFIX}engine"


def router_policy_name(service: str) -> str:
    """Return the name of the NetworkPolicy of the router."""
    return router_name(service)


def control_config_name(service: str) -> str:
    """Return the name of the ConfigMap with the public control keys (JWKS)."""
    return f"{service}{CHILD_INFIX}control"


def prefetch_name(service: str) -> str:
    """Return the name of the Job that downloads a new model, and of its NetworkPolicy."""
    return f"{service}{CHILD_INFIX}prefetch"


def selector(service: str, component: Component) -> dict[str, str]:
    """Return the labels that select exactly the pods of one component of one service."""
    return {LABEL_SERVICE: service, LABEL_COMPONENT: component.value}


def labels(service: str, component: Component) -> dict[str, str]:
    """Return the labels of every child object and of its pods."""
    return {LABEL_MANAGED_BY: MANAGED_BY, **selector(service, component)}


def selector_text(service: str) -> str:
    """Return the engines' selector as a string, for `status.selector` and the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in selector(service, Component.ENGINE).items())


def service_url(service: str, namespace: str) -> str:
    """Return the URL of the OpenAI-compatible API inside the cluster."""
    return f"http://{service}.{namespace}.svc:80/v1"
