"""The ConfigMap with the public control keys."""

from __future__ import annotations

from fleetkeeper.api.names import Component, control_config_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.plan.context import PlanContext
from fleetkeeper.plan.manifests.common import desired_metadata
from fleetkeeper.plan.model import Manifest

KEYS_FILE = "jwks.json"


def desired_control_config(service: InferenceService, context: PlanContext) -> Manifest:
    """The keys with which engines check who steers them. Public halves only: no secret."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": desired_metadata(service, control_config_name(service.name), Component.CONTROL),
        "data": {KEYS_FILE: context.control_keys},
    }
