"""The PodDisruptionBudget of the engines."""

from __future__ import annotations

from fleetkeeper.api.names import Component, disruption_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.plan.manifests.common import desired_metadata
from fleetkeeper.plan.model import Manifest


def desired_disruption_budget(service: InferenceService) -> Manifest:
    """How many engines an eviction may take; those that are not ready may always go."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": desired_metadata(service, disruption_name(service.name), Component.ENGINE),
        "spec": {
            "maxUnavailable": service.spec.disruption.max_unavailable,
            "selector": {"matchLabels": selector(service.name, Component.ENGINE)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
