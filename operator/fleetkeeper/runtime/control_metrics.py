"""What the control loop decides and sees, as gauges by service, and how the loop itself fares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetkeeper.runtime.queue import Key

SERVICE_LABELS = ("namespace", "inference_service")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Gauge = tuple[str, tuple[tuple[str, str], ...], float]


class ControlMetrics(Collector):
    """Gauges of every service, collected when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges: dict[Key, tuple[Gauge, ...]] = {}
        self.tick_seconds = Histogram(
            "fleetkeeper_tick_seconds",
            "How long one tick over all services took, its requests included.",
            buckets=SECONDS,
            registry=registry,
        )
        self.puts = Counter(
            "fleetkeeper_limit_puts",
            "Orders of limits sent to engines, by what came of them: ok, failed.",
            ("result",),
            registry=registry,
        )
        registry.register(self)

    def show(self, key: Key, gauges: Iterable[Gauge]) -> None:
        """These are the gauges of the service now."""
        self._gauges[key] = tuple(gauges)

    def forget(self, key: Key) -> None:
        """The service is gone, and its series with it."""
        self._gauges.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: which gauges there are depends on the services."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family a name, one sample a service and label set."""
        families: dict[str, GaugeMetricFamily] = {}
        for key, gauges in self._gauges.items():
            for name, labels, value in gauges:
                family = families.get(name)
                if family is None:
                    family = families[name] = GaugeMetricFamily(
                        f"fleetkeeper_{name}",
                        "Of the control loop's last decision; see the reference of metrics.",
                        labels=(*SERVICE_LABELS, *(label for label, _ in labels)),
                    )
                values = (key.namespace, key.name, *(text for _, text in labels))
                family.add_metric(values, value)
        yield from families.values()
