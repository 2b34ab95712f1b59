"""Metrics of the control loop: its decisions and inputs by service, and its own health."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from fleetkeeper.runtime.telemetry.service_series import ServiceSeries

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ControlMetrics(ServiceSeries):
    """The series of every service, and those of the loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.tick_seconds = Histogram(
            "fleetkeeper_tick_seconds",
            "Duration of one tick over all services, including its requests.",
            buckets=SECONDS,
            registry=registry,
        )
        self.puts = Counter(
            "fleetkeeper_limit_puts",
            "Limits requests sent to engines, by result: ok, failed.",
            ("result",),
            registry=registry,
        )
