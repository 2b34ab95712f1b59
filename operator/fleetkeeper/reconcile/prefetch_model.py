"""The model of a pod template: the one that its engines would load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

DOCUMENT_VARIABLE = "FLEETKEEPER_ENGINE"
"""The variable of an engine with its start-up configuration."""


def model_of(pod_spec: Mapping[str, Any]) -> str:
    """Return the source and the revision of the engine's model, "" if they cannot be read.

    Worked example: `meta-llama/Llama-3.1-8B@0e9e39f`.
    """
    model = _document(pod_spec).get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("source"), str):
        return ""
    return f"{model['source']}@{model.get('revision') or ''}"


def _document(pod_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in _maps(pod_spec.get("containers")):
        for variable in _maps(container.get("env")):
            if variable.get("name") == DOCUMENT_VARIABLE:
                return _parsed(variable.get("value"))
    return {}


def _parsed(value: object) -> Mapping[str, Any]:
    try:
        document = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):  # a live object may hold any text
        return {}
    return document if isinstance(document, Mapping) else {}


def _maps(value: object) -> Sequence[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else ()
