"""Metrics of the queue. None has a label for keys or batches."""

from __future__ import annotations

from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)


class QueueMetrics:
    """Metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "fleetkeeper_gateway_batch_queue_up",
            "1 if this process takes and commits lines; 0 if Redis does not answer or is rebuilt.",
            registry=registry,
        )
        self.epoch = Gauge(
            "fleetkeeper_gateway_batch_queue_epoch",
            "Number of the epoch that this process works in. It grows by one or more with each rebuild.",
            registry=registry,
        )
        self.failures = Counter(
            "fleetkeeper_gateway_batch_queue_failures",
            "Connections to Redis that failed, or were given up because Redis was reset.",
            registry=registry,
        )
        self.rebuilds = Counter(
            "fleetkeeper_gateway_batch_queue_rebuilds",
            "Rebuilds of the queue from the store that this process completed.",
            registry=registry,
        )
        self.rebuild_seconds = Histogram(
            "fleetkeeper_gateway_batch_queue_rebuild_seconds",
            "Time of a rebuild.",
            buckets=SECONDS,
            registry=registry,
        )
        self.taken = Counter(
            "fleetkeeper_gateway_batch_queue_taken", "Lines taken.", registry=registry
        )
        self.committed = Counter(
            "fleetkeeper_gateway_batch_queue_committed", "Results recorded.", registry=registry
        )
        self.refused = Counter(
            "fleetkeeper_gateway_batch_queue_refused",
            "Results not recorded, by reason: lease (another process took the line), epoch (the lease is from before a rebuild), recorded (the line has a result), removed (the batch has ended), down (Redis did not do it; it may be tried again).",
            ("reason",),
            registry=registry,
        )


@cache
def queue_metrics(registry: CollectorRegistry = REGISTRY) -> QueueMetrics:
    """Return the metrics in a registry. A process has them once."""
    return QueueMetrics(registry)
