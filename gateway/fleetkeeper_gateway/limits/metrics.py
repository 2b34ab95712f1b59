"""Metrics of the limits. They have no label for keys, because there may be 10,000."""

from __future__ import annotations

from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)


class LimitMetrics:
    """Metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.shared = Gauge(
            "fleetkeeper_gateway_limits_shared",
            "1 if replicas share their limits in Redis; 0 if this replica has limits of its own.",
            registry=registry,
        )
        self.failures = Counter(
            "fleetkeeper_gateway_limits_redis_failures",
            "Changes from shared to local limits, and failed attempts to change back.",
            registry=registry,
        )
        self.seconds = Histogram(
            "fleetkeeper_gateway_limits_redis_seconds",
            "Time of a request's admission in Redis.",
            buckets=SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "fleetkeeper_gateway_limits_refused",
            "Requests refused, by limit: requests, tokens, concurrency.",
            ("limit",),
            registry=registry,
        )
        self.unsettled = Counter(
            "fleetkeeper_gateway_limits_unsettled",
            "Requests whose estimate stands because Redis did not take the tokens that they used.",
            registry=registry,
        )


@cache
def limit_metrics(registry: CollectorRegistry = REGISTRY) -> LimitMetrics:
    """Return the metrics of a registry, created once."""
    return LimitMetrics(registry)
