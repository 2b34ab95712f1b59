"""The parts of a process of the request path."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import NamedTuple

from fleetkeeper_gateway.http.baggage import GrantReader
from fleetkeeper_gateway.http.connections.bodies import BodyBudget
from fleetkeeper_gateway.http.connections.refused_bytes import RefusedBytes
from fleetkeeper_gateway.http.errors import unavailable
from fleetkeeper_gateway.http.open_requests import OpenRequests
from fleetkeeper_gateway.http.settings import ServeSettings
from fleetkeeper_gateway.interfaces import (
    AuditLog,
    BatchTokens,
    GrantSigner,
    Hold,
    Key,
    Keys,
    RequestLimiter,
    Services,
)
from fleetkeeper_gateway.telemetry import metrics
from fleetkeeper_gateway.upstream.attempts import Upstream


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that other packages provide."""

    services: Services
    keys: Keys
    limiter: RequestLimiter
    hold: Hold
    signer: GrantSigner
    grants: GrantReader
    batch_tokens: BatchTokens
    audit: AuditLog
    estimate: Callable[[int, int | None, int], int]
    """Returns the estimated tokens of a request from its prompt's bytes, `max_tokens` and number of answers."""
    background: tuple[Callable[[], Coroutine[None, None, None]], ...] = ()
    """Tasks that run beside the requests until they are cancelled."""


class Caller(NamedTuple):
    """The sender of a request."""

    key: Key
    in_batch: bool
    """True for requests of the batch process. They always run in tier batch."""


class Gateway:
    """The state that all requests share."""

    def __init__(self, settings: ServeSettings, parts: Parts, upstream: Upstream) -> None:
        self.settings = settings
        self.parts = parts
        self.upstream = upstream
        self.bodies = BodyBudget(settings.body_budget_bytes)
        self.refused = RefusedBytes()
        self.open_requests = OpenRequests(
            parts.keys,
            request_timeout_s=settings.request_timeout_seconds,
            idle_timeout_s=settings.idle_timeout_seconds,
        )
        self.draining = False
        metrics.BODY_BYTES.set_function(lambda: self.bodies.held_bytes)

    @property
    def ready(self) -> bool:
        """Return whether the process can serve requests."""
        return self.synced and not self.draining

    @property
    def synced(self) -> bool:
        """Return whether keys and services were listed."""
        return self.parts.keys.synced and self.parts.services.synced

    def state(self) -> dict[str, bool]:
        """Return the conditions that readiness depends on."""
        return {
            "ready": self.ready,
            "draining": self.draining,
            "keys": self.parts.keys.synced,
            "services": self.parts.services.synced,
        }

    def authenticate(self, authorization: str | None) -> Caller:
        """Return the sender of a request.

        Raises:
            KeyRefused: if the key is not accepted.
            Refusal: if the keys are not known yet.
        """
        if not self.synced:
            raise unavailable(
                "starting", "The gateway does not know keys and services yet. Try again.", 1
            )
        now = time.time()
        token = _token(authorization)
        key_id = self.parts.batch_tokens.key_of(token) if token is not None else None
        if key_id is not None:
            return Caller(self.parts.keys.named(key_id, now), in_batch=True)
        return Caller(self.parts.keys.authenticate(authorization, now), in_batch=False)


def _token(authorization: str | None) -> str | None:
    """Return the bearer token of a header if it has the form of a signed token, which no API key has."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token.count(".") == 2 else None
