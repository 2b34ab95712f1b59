"""The ConfigMap that running engines read: the public control keys and the policy."""

from __future__ import annotations

from fleetkeeper.api.names import Component, control_config_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.common import desired_metadata
from fleetkeeper.reconcile.manifests.engine_document import desired_policy, document_text

KEYS_FILE = "jwks.json"
POLICY_FILE = "policy.json"


def desired_control_config(service: InferenceService, context: PlanContext) -> Manifest:
    """Return the ConfigMap with the public keys that verify limits requests, and the policy."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": desired_metadata(service, control_config_name(service.name), Component.CONTROL),
        "data": {
            KEYS_FILE: context.control_keys,
            POLICY_FILE: document_text(desired_policy(service.spec)),
        },
    }
