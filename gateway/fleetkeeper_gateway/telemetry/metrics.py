"""Metrics of the request path. No label holds a key, and none a text of a client."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
)

REQUESTS: Final = Counter(
    "fleetkeeper_gateway_requests_total",
    "Requests that a service answered, by the status of its answer.",
    ("service", "tier", "status"),
)
REFUSED: Final = Counter(
    "fleetkeeper_gateway_refused_total",
    "Requests that the gateway answered itself, by the code of its error.",
    ("code",),
)
ABORTED: Final = Counter(
    "fleetkeeper_gateway_aborted_total",
    "Requests that ended before their whole answer was passed on, by reason.",
    ("reason",),
)
NOT_SENT: Final = Counter(
    "fleetkeeper_gateway_not_sent_total",
    "Attempts that no service took, by reason. They are repeated for a bounded time.",
    ("reason",),
)
OPEN: Final = Gauge("fleetkeeper_gateway_open_requests", "Requests that are open.")
BODY_BYTES: Final = Gauge(
    "fleetkeeper_gateway_body_bytes", "Bytes of bodies that were read and not yet sent."
)
CLOSED: Final = Counter(
    "fleetkeeper_gateway_connections_closed_total",
    "Connections that were closed to make room: the oldest heads without end, and the oldest connections "
    "on which no key was accepted yet.",
    ("reason",),
)
UNTIL_SENT: Final = Histogram(
    "fleetkeeper_gateway_until_sent_seconds",
    "Time from a request's head until it goes to a service: its body, key, limits and grant.",
    ("tier",),
    buckets=_SECONDS,
)
UNTIL_ANSWERED: Final = Histogram(
    "fleetkeeper_gateway_until_answered_seconds",
    "Time from sending a request until the head of the answer, with the wait for a service.",
    ("tier",),
    buckets=_SECONDS,
)


# `labels` takes longer than what it returns, so the children are kept.


_OF_SERVICES: Final[dict[str, dict[tuple[str, int], Counter]]] = {}
_STATUSES: Final = frozenset(
    (200, 400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 499, 500, 501, 502, 503, 504)
)
"""Statuses that get a series of their own. Otherwise a service could create a series for every number."""


def requests(service: str, tier: str, status: int) -> Counter:
    """Return the counter of the requests that a service answered with a status."""
    counters = _OF_SERVICES.setdefault(service, {})
    found = counters.get((tier, status))
    if found is None:
        label = str(status) if status in _STATUSES else f"{status // 100}xx"
        found = counters[tier, status] = REQUESTS.labels(service, tier, label)
    return found


def forget_services(known: Container[str]) -> None:
    """Remove the series of services that are gone."""
    for service in [service for service in _OF_SERVICES if service not in known]:
        del _OF_SERVICES[service]
        REQUESTS.remove_by_labels({"service": service})


@lru_cache(maxsize=8)
def until_sent(tier: str) -> Histogram:
    """Return the histogram of a tier."""
    return UNTIL_SENT.labels(tier)


@lru_cache(maxsize=8)
def until_answered(tier: str) -> Histogram:
    """Return the histogram of a tier."""
    return UNTIL_ANSWERED.labels(tier)
