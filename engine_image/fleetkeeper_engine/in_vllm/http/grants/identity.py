"""The sender of a request, from its grant. Other middleware finds it in the request's scope."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.asgi import Scope

SCOPE_KEY = "fleetkeeper.grant"


@dataclass(frozen=True, slots=True)
class GrantIdentity:
    """The claims of a valid grant."""

    attempt: str
    """ID of this attempt: an engine accepts it once."""
    request: str
    """ID of the request, the same in each attempt."""
    key: str
    """ID of the client's key."""
    tier: Tier
    expires: float
    """Unix seconds."""


def identity_of(scope: Scope) -> GrantIdentity | None:
    """Return the identity of a request; None if it came without a grant."""
    found = scope.get(SCOPE_KEY)
    return found if isinstance(found, GrantIdentity) else None
