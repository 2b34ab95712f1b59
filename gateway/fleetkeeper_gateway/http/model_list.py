"""GET /v1/models: the models that a key may use, with the state of their services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetkeeper_gateway.http.errors import unknown_model
from fleetkeeper_gateway.interfaces import Key, Service, Services


def list_models(services: Services, key: Key) -> dict[str, Any]:
    """Return the body of GET /v1/models."""
    by_model: dict[str, list[Service]] = {}
    for service in services.all():
        for model in service.models:
            if key.sees(service, model):
                by_model.setdefault(model, []).append(service)
    return {
        "object": "list",
        "data": [_entry(model, by_model[model]) for model in sorted(by_model)],
    }


def describe_model(services: Services, key: Key, model: str) -> dict[str, Any]:
    """Return the body of GET /v1/models/{model}.

    Raises:
        Refusal: if the key sees no such model.
    """
    visible = [service for service in services.serving(model) if key.sees(service, model)]
    if not visible:
        raise unknown_model(model)
    return _entry(model, visible)


def _entry(model: str, services: Iterable[Service]) -> dict[str, Any]:
    # The first one is the best: its state is the model's.
    ranked = sorted(services, key=lambda service: (not service.ready, service.path))
    return {
        "id": model,
        "object": "model",
        "created": min(service.created for service in ranked),
        "owned_by": "fleetkeeper",
        "state": ranked[0].state,
        "services": [
            {"service": service.path, "state": service.state, "ready": service.ready}
            for service in ranked
        ],
    }
