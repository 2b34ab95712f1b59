"""Metrics of the control loop: gauges of its decisions and inputs by service, and its own health."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetkeeper.runtime.queue import Key

SERVICE_LABELS = ("service_namespace", "inference_service")
"""Not `namespace`: with `honor_labels: false`, Prometheus gives that name to the scraped pod's namespace."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Gauge = tuple[str, tuple[tuple[str, str], ...], float]


class ControlMetrics(Collector):
    """The gauges of every service, collected at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges: dict[Key, tuple[Gauge, ...]] = {}
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
        registry.register(self)

    def show(self, key: Key, gauges: Iterable[Gauge]) -> None:
        """Set the gauges of a service."""
        self._gauges[key] = tuple(gauges)

    def forget(self, key: Key) -> None:
        """Remove the series of a deleted service."""
        self._gauges.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which gauges exist depends on the services."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name, with one sample per service and label set."""
        families: dict[str, GaugeMetricFamily] = {}
        for key, gauges in self._gauges.items():
            for name, labels, value in gauges:
                family = families.get(name)
                if family is None:
                    family = families[name] = GaugeMetricFamily(
                        f"fleetkeeper_{name}",
                        "Value at the control loop's last decision; see the metrics reference.",
                        labels=(*SERVICE_LABELS, *(label for label, _ in labels)),
                    )
                values = (key.namespace, key.name, *(text for _, text in labels))
                family.add_metric(values, value)
        yield from families.values()
