"""Every name that Fleetkeeper gives: the API's own, labels, annotations and children.

These are promises. A label or a child's name that changed would orphan what an older version made.
"""

from __future__ import annotations

from enum import StrEnum
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

FIELD_MANAGER: Final = "fleetkeeper"
"""The one field manager of every server-side apply."""

LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "fleetkeeper"
"""The value of `LABEL_MANAGED_BY` on every child."""
LABEL_SERVICE: Final = "fleetkeeper.io/service"
LABEL_COMPONENT: Final = "fleetkeeper.io/component"

ANNOTATION_TEMPLATE_HASH: Final = "fleetkeeper.io/template-hash"
"""On the engine's pod template: the hash of the template without this annotation."""
ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: the pod with the lowest cost goes first on a scale-down."""

RESERVED_PREFIXES: Final = ("fleetkeeper.io/", "app.kubernetes.io/managed-by")
"""Label and annotation names that begin so are refused in `podMetadata`."""

NAME_MAX_LENGTH: Final = 50
"""The longest service name: with the longest suffix of a child it stays within a label's 63."""
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
CHILD_INFIX: Final = "-fk-"
"""Stands between the service's name and the part of a child; a service's own name has none."""


class Component(StrEnum):
    """The values of the component label. Frozen: selectors hold them."""

    ENGINE = "engine"
    ROUTER = "router"
    CONTROL = "control"


def engine_name(service: str) -> str:
    """The engine Deployment."""
    return service


def address_name(service: str) -> str:
    """The Kubernetes Service that clients call."""
    return service


def router_name(service: str) -> str:
    """The router's Deployment, ServiceAccount, RoleBinding, NetworkPolicy and PodDisruptionBudget."""
    return f"{service}{CHILD_INFIX}router"


def disruption_name(service: str) -> str:
    """The PodDisruptionBudget of the engines."""
    return f"{service}{CHILD_INFIX}engine"


def engine_policy_name(service: str) -> str:
    """The NetworkPolicy of the engines."""
    return f"{service}{CHILD_INFIX}engine"


def router_policy_name(service: str) -> str:
    """The NetworkPolicy of the router."""
    return router_name(service)


def control_config_name(service: str) -> str:
    """The ConfigMap with the public control keys (JWKS)."""
    return f"{service}{CHILD_INFIX}control"


def selector(service: str, component: Component) -> dict[str, str]:
    """The labels that select the pods of one component of one service, and no others."""
    return {LABEL_SERVICE: service, LABEL_COMPONENT: component.value}


def labels(service: str, component: Component) -> dict[str, str]:
    """The labels of every child and of every pod of a child."""
    return {LABEL_MANAGED_BY: MANAGED_BY, **selector(service, component)}


def selector_text(service: str) -> str:
    """The engines' selector as one string, as `status.selector` and the scale subresource hold it."""
    return ",".join(f"{key}={value}" for key, value in selector(service, Component.ENGINE).items())


def service_url(service: str, namespace: str) -> str:
    """The address of the OpenAI-compatible API inside the cluster."""
    return f"http://{service}.{namespace}.svc:80/v1"
