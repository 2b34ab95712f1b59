"""The ConfigMap that running engines read: the public control keys, the policy, and what grants they demand."""

from __future__ import annotations

import json

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.enums import AccessMode
from fleetkeeper.api.names import Component, control_config_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.common import desired_metadata
from fleetkeeper.reconcile.manifests.engine_document import desired_policy, document_text
from fleetkeeper.reconcile.observe.problem import Problem
from fleetkeeper_contract.grants import GRANTS_FILE

KEYS_FILE = "jwks.json"
POLICY_FILE = "policy.json"


def desired_control_config(service: InferenceService, context: PlanContext) -> Manifest:
    """Return the ConfigMap with the public keys that verify limits requests, and the policy.

    grants.json is added if it says something: the service demands grants, or there is a gateway. An
    engine without the file demands none.
    """
    data = {
        KEYS_FILE: context.control_keys,
        POLICY_FILE: document_text(desired_policy(service.spec)),
    }
    if context.grant_keys or service.spec.access is AccessMode.GATEWAY:
        data[GRANTS_FILE] = document_text(desired_grants(service, context))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": desired_metadata(service, control_config_name(service.name), Component.CONTROL),
        "data": data,
    }


def desired_grants(service: InferenceService, context: PlanContext) -> Manifest:
    """Return what grants.json says. Without keys a demand refuses every request, and never opens."""
    keys = json.loads(context.grant_keys)["keys"] if context.grant_keys else []
    return {
        "demanded": service.spec.access is AccessMode.GATEWAY,
        "service": service.uid,
        "keys": keys,
    }


def grants_problem(service: InferenceService, context: PlanContext) -> Problem | None:
    """Return why the engines refuse every request: they demand grants, and no gateway can sign any."""
    if service.spec.access is not AccessMode.GATEWAY or context.grant_keys:
        return None
    return Problem(
        Reason.NO_GRANT_KEYS,
        "spec.access is Gateway, but the operator has no keys of a gateway (setting grantJwksFile), so "
        "engines refuse every request. Install the gateway, or set spec.access to Open.",
    )
