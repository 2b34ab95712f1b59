"""Chooses the tier and the service of a request, and lists the models of a key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_contract.tiers import TIER_BY_LABEL, Tier
from fleetkeeper_gateway.http.errors import Refusal, ambiguous_model, unknown_model
from fleetkeeper_gateway.interfaces import Key, Service, Services


def choose_tier(name: str | None, key: Key) -> Tier:
    """Return the tier of a request.

    Args:
        name: the header's value; None if absent.
        key: the client's key.

    Raises:
        Refusal: if the tier is unknown, or above the key's highest.
    """
    if name is None:
        return max(Tier.STANDARD, key.highest)
    tier = TIER_BY_LABEL.get(name.strip().lower())
    if tier is None:
        labels = ", ".join(TIER_BY_LABEL)
        raise Refusal(
            400,
            "unknown_tier",
            f"{TIER_HEADER} is {name[:64]!r}; it must be one of {labels}.",
        )
    if tier < key.highest:
        raise Refusal(
            403,
            "tier_not_allowed",
            f"The highest tier of your key is {key.highest.label}; the request asks for {tier.label}.",
        )
    return tier


def choose_service(services: Services, key: Key, model: str, named: str | None) -> Service:
    """Return the service that gets a request.

    Args:
        services: all services.
        key: the client's key.
        model: the model of the request.
        named: NAMESPACE/NAME of the header X-Fleetkeeper-Service; None if absent.

    Raises:
        Refusal: if the key sees no such service, or several.
    """
    visible = _visible(services, key, model)
    if named is not None:
        visible = [service for service in visible if service.path == named.strip()]
    if not visible:
        raise unknown_model(model)
    if len(visible) > 1:
        raise ambiguous_model(model, visible)
    return visible[0]


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
    visible = _visible(services, key, model)
    if not visible:
        raise unknown_model(model)
    return _entry(model, visible)


def _visible(services: Services, key: Key, model: str) -> list[Service]:
    return [service for service in services.serving(model) if key.sees(service, model)]


def _entry(model: str, services: Iterable[Service]) -> dict[str, Any]:
    # The first service is the best: its state is the model's.
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
