"""The PodDisruptionBudgets of the engines and of the routers."""

from __future__ import annotations

from typing import Final

from fleetkeeper.api.names import Component, disruption_name, router_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.common import desired_metadata

MAX_UNAVAILABLE_ROUTERS: Final = 1
"""One at a time. A single router gets no budget: it would protect nothing or block a node drain."""


def desired_disruption_budget(service: InferenceService) -> Manifest:
    """Return the budget for evictions of engines. An unready engine may always be evicted."""
    return _budget(
        service,
        disruption_name(service.name),
        Component.ENGINE,
        service.spec.disruption.max_unavailable,
    )


def desired_router_disruption_budget(service: InferenceService) -> Manifest:
    """Return the budget for evictions of routers. An unready router may always be evicted."""
    return _budget(service, router_name(service.name), Component.ROUTER, MAX_UNAVAILABLE_ROUTERS)


def _budget(
    service: InferenceService, name: str, component: Component, max_unavailable: int | str
) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": desired_metadata(service, name, component),
        "spec": {
            "maxUnavailable": max_unavailable,
            "selector": {"matchLabels": selector(service.name, component)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
