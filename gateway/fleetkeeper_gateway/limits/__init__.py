"""Limits of a client's key in a tier: requests and tokens a minute, and requests at once."""

from __future__ import annotations

from functools import partial

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from fleetkeeper_gateway.interfaces import RequestLimiter
from fleetkeeper_gateway.limits.connect import new_connection
from fleetkeeper_gateway.limits.limiter import KeyLimiter
from fleetkeeper_gateway.limits.link import Link, Timing
from fleetkeeper_gateway.limits.metrics import limit_metrics
from fleetkeeper_gateway.limits.rules import estimate_tokens
from fleetkeeper_gateway.limits.settings import LimitSettings

__all__ = ["LimitSettings", "Timing", "create_limiter", "estimate_tokens"]

log = structlog.get_logger(__name__)


def create_limiter(
    settings: LimitSettings,
    *,
    registry: CollectorRegistry = REGISTRY,
    timing: Timing | None = None,
) -> RequestLimiter:
    """Return a limiter, and begin to connect to Redis if it is set. To be called in the event loop."""
    timing = timing or Timing()
    metrics = limit_metrics(registry)
    limiter = KeyLimiter(timing, metrics)
    if settings.shared:
        connect = partial(new_connection, settings)
        limiter.share(Link(connect, timing, metrics, limiter.caught_up))
    else:
        log.info("limits are local to this replica: no Redis is set")
    limiter.start()
    return limiter
