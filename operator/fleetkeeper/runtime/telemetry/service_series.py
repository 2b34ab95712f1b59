"""Series of single services: each has the labels of its service, and goes with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetkeeper.runtime.queue import Key

SERVICE_LABELS: Final = ("service_namespace", "inference_service")
"""Not `namespace`: with `honor_labels: false`, Prometheus gives that name to the scraped pod's namespace."""
HELP: Final = "By service, as of its last tick or reconcile; see the metrics reference."

Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]
Sample = tuple[str, Labels, float]


class ServiceSeries(Collector):
    """Gauges and counters of every service, collected at each scrape, in a thread of its own.

    Names are without `fleetkeeper_`, and those of counters without `_total`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges: dict[Key, tuple[Sample, ...]] = {}
        self._counts: dict[Key, Counter[Series]] = {}
        registry.register(self)

    def show(self, key: Key, gauges: Iterable[Sample]) -> None:
        """Set the gauges of a service: those that are not given are gone."""
        self._gauges[key] = tuple(gauges)

    def count(self, key: Key, increments: Iterable[Sample]) -> None:
        """Add to the counters of a service. An increment of 0 makes the series exist."""
        counts = self._counts.setdefault(key, Counter())
        for name, labels, by in increments:
            counts[name, labels] += int(by)

    def forget(self, key: Key) -> None:
        """Remove the series of a deleted service."""
        self._gauges.pop(key, None)
        self._counts.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series exist depends on the services."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name, with one sample per service and label set."""
        # Tuples, because the event loop may add a service in the meantime.
        yield from _families(GaugeMetricFamily, tuple(self._gauges.items()))
        counts = (
            (
                key,
                [(name, labels, float(count)) for (name, labels), count in tuple(counted.items())],
            )
            for key, counted in tuple(self._counts.items())
        )
        yield from _families(CounterMetricFamily, counts)


def _families(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    services: Iterable[tuple[Key, Iterable[Sample]]],
) -> Iterable[Metric]:
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for key, samples in services:
        for name, labels, value in samples:
            family = families.get(name)
            if family is None:
                names = (*SERVICE_LABELS, *(label for label, _ in labels))
                family = families[name] = kind(f"fleetkeeper_{name}", HELP, labels=names)
            family.add_metric((key.namespace, key.name, *(text for _, text in labels)), value)
    return families.values()
