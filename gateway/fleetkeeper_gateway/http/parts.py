"""What one process of the request path is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from fleetkeeper_gateway.http.baggage import GrantReader
from fleetkeeper_gateway.http.bodies import BodyBudget
from fleetkeeper_gateway.http.errors import unavailable
from fleetkeeper_gateway.http.open_requests import OpenRequests
from fleetkeeper_gateway.http.settings import ServeSettings
from fleetkeeper_gateway.interfaces import AuditLog, GrantSigner, Key, Keys, Limiter, Services
from fleetkeeper_gateway.telemetry import metrics
from fleetkeeper_gateway.upstream.attempts import Upstream


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that others make."""

    services: Services
    keys: Keys
    limiter: Limiter
    signer: GrantSigner
    grants: GrantReader
    audit: AuditLog
    estimate: Callable[[int, int | None, int], int]
    """Returns the tokens that a request may use, from the bytes of its body, the most tokens of an
    answer, and the number of answers."""
    background: tuple[Callable[[], Coroutine[None, None, None]], ...] = ()
    """What runs beside the requests, until it is cancelled."""


class Gateway:
    """The state that all requests share."""

    def __init__(self, settings: ServeSettings, parts: Parts, upstream: Upstream) -> None:
        self.settings = settings
        self.parts = parts
        self.upstream = upstream
        self.bodies = BodyBudget(settings.body_budget_bytes)
        self.open_requests = OpenRequests(
            parts.keys,
            request_timeout_s=settings.request_timeout_seconds,
            idle_timeout_s=settings.idle_timeout_seconds,
        )
        self.draining = False
        metrics.BODY_BYTES.set_function(lambda: self.bodies.held_bytes)

    @property
    def ready(self) -> bool:
        """Return whether requests may come."""
        return self.synced and not self.draining

    @property
    def synced(self) -> bool:
        """Return whether keys and services are known."""
        return self.parts.keys.synced and self.parts.services.synced

    def authenticate(self, authorization: str | None) -> Key:
        """Return the key of a request.

        Raises:
            KeyRefused: if it is not accepted.
            Refusal: if the keys are not known yet.
        """
        if not self.synced:
            raise unavailable(
                "starting", "The gateway does not know keys and services yet. Try again.", 1
            )
        return self.parts.keys.authenticate(authorization, time.time())
