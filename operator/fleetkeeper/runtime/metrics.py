"""The operator's own metrics. Names and labels are a promise to dashboards and alerts.

Labels never hold a service's name: their number would grow with the fleet.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.reconciles = Counter(
            "fleetkeeper_reconciles",
            "Looks at a service, by what came of them: unchanged, written, failed.",
            ("result",),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "fleetkeeper_reconcile_seconds",
            "How long a look at a service took, its writes included.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            "fleetkeeper_decision_seconds",
            "How long the pure decision took.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.decisions = Counter(
            "fleetkeeper_decisions",
            "Actions decided, by kind: apply, create, delete, mark_pod, status, notice.",
            ("action",),
            registry=self.registry,
        )
        self.writes = Counter(
            "fleetkeeper_writes",
            "Writes sent to the Kubernetes API, by verb and kind.",
            ("verb", "kind"),
            registry=self.registry,
        )
        self.errors = Counter(
            "fleetkeeper_errors",
            "Requests that failed, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.defects = Counter(
            "fleetkeeper_defects",
            "Steps that failed by a defect of Fleetkeeper, by the step. The service concerned keeps what it had and is Degraded with the reason InternalError.",
            ("where",),
            registry=self.registry,
        )
        self.digest_mismatches = Counter(
            "fleetkeeper_digest_mismatches",
            "Applies whose answer differs from what was asked in a field that we own: admission changed it, or a builder does not write the API server's own form.",
            ("kind",),
            registry=self.registry,
        )
        self.queue = Gauge(
            "fleetkeeper_queue",
            "Services in the queue, by state: ready, working, waiting.",
            ("state",),
            registry=self.registry,
        )
        self.services = Gauge(
            "fleetkeeper_services", "InferenceServices in the cache.", registry=self.registry
        )
        self.records = Gauge(
            "fleetkeeper_records",
            "Children, ReplicaSets and pods in the cache.",
            registry=self.registry,
        )
        self.unreadable = Gauge(
            "fleetkeeper_unreadable_objects",
            "Objects that are there and cannot be read, by kind: their services get no create, delete or scale.",
            ("kind",),
            registry=self.registry,
        )
        self.leader = Gauge(
            "fleetkeeper_leader",
            "1 where this process leads, 0 where it stands by.",
            registry=self.registry,
        )
        self.lists = Counter(
            "fleetkeeper_lists", "Lists finished, by kind.", ("kind",), registry=self.registry
        )
        self.ghosts = Counter(
            "fleetkeeper_ghosts",
            "Services that a plain list showed to be gone although no event had said so.",
            registry=self.registry,
        )
        self.namespace_unreadable = Gauge(
            "fleetkeeper_namespace_unreadable",
            "1 where one of several served namespaces cannot be read: its services are left as they are.",
            ("namespace",),
            registry=self.registry,
        )
        self.loop_lag_seconds = Gauge(
            "fleetkeeper_loop_lag_seconds",
            "How late the event loop was at its last check.",
            registry=self.registry,
        )
        self.last_resync_seconds = Gauge(
            "fleetkeeper_last_resync_timestamp_seconds",
            "When the last full resync ended.",
            registry=self.registry,
        )
