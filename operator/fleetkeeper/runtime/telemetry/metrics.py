"""The operator's own metrics. Names and labels are stable, for dashboards and alerts.

Labels never contain a service's name: the number of series would grow with the fleet. `states` are the
exception: a fixed number of series for each service.
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

from fleetkeeper.runtime.telemetry.service_series import ServiceSeries

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """All metrics of the operator, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.states = ServiceSeries(self.registry)
        self.reconciles = Counter(
            "fleetkeeper_reconciles",
            "Reconciles of a service, by result: unchanged, written, failed.",
            ("result",),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "fleetkeeper_reconcile_seconds",
            "Duration of one reconcile, including its writes.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            "fleetkeeper_decision_seconds",
            "Duration of planning within a reconcile, without reads and writes.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.decisions = Counter(
            "fleetkeeper_decisions",
            "Actions decided, by kind: apply, create, delete, mark_pod, status, event.",
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
            "Failed requests to the Kubernetes API, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.defects = Counter(
            "fleetkeeper_defects",
            "Steps that failed because of a defect in Fleetkeeper, by step. The affected service keeps its last state and is Degraded with reason InternalError.",
            ("where",),
            registry=self.registry,
        )
        self.digest_mismatches = Counter(
            "fleetkeeper_digest_mismatches",
            "Applies whose live object differs in a field that Fleetkeeper owns: admission changed it, or Fleetkeeper did not write it in the API server's canonical form.",
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
            "Objects that exist but cannot be read, by kind. Nothing of their services is created, deleted or scaled.",
            ("kind",),
            registry=self.registry,
        )
        self.leader = Gauge(
            "fleetkeeper_leader",
            "1 if this process is the leader, 0 if it is a standby.",
            registry=self.registry,
        )
        self.ghosts = Counter(
            "fleetkeeper_ghosts",
            "Deleted services that the watch missed and a resync found.",
            registry=self.registry,
        )
        self.namespace_unreadable = Gauge(
            "fleetkeeper_namespace_unreadable",
            "1 if the namespace cannot be read, so that its services are not reconciled. Only if several namespaces are served.",
            ("service_namespace",),
            registry=self.registry,
        )
        self.grant_keys = Gauge(
            "fleetkeeper_grant_keys",
            "Public keys of the gateway that engines receive; 0 if no gateway is installed.",
            registry=self.registry,
        )
        self.wake_marks = Gauge(
            "fleetkeeper_wake_marks",
            "Wake marks in the ConfigMap: one for each sleeping service with requests that gateways hold, and those that no gateway has removed yet.",
            registry=self.registry,
        )
        self.loop_lag_seconds = Gauge(
            "fleetkeeper_loop_lag_seconds",
            "Delay of the event loop at its last check.",
            registry=self.registry,
        )
        self.last_resync_seconds = Gauge(
            "fleetkeeper_last_resync_timestamp_seconds",
            "Time at which the last full resync ended.",
            registry=self.registry,
        )
