"""Distribution of one tick's query results to their pods, as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper.adapters.prometheus.queries import (
    BACKLOG,
    BACKLOG_SERIES,
    BACKLOG_TIME,
    DISPUTED,
    TIMES,
)
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.signals.series_map import PodSeries
from fleetkeeper_contract import batch_metrics

PodKey = tuple[str, str]
"""Namespace and name of a pod."""
ServiceName = tuple[str, str]
"""Namespace and name of a service."""


@dataclass(frozen=True, slots=True)
class PrometheusReading:
    """The current samples of Prometheus."""

    samples: Mapping[PodKey, PodSample]
    disputed: frozenset[PodKey] = frozenset()
    """Pods with more than one series where one is expected. They have no sample."""
    problems: tuple[str, ...] = ()
    """One message for each query without an answer for some pods."""
    backlogs: Mapping[ServiceName, Backlog] = field(default_factory=dict)
    """The backlog that the batch process exports, by service."""
    defects: Mapping[PodKey, Exception] = field(default_factory=dict)
    """Pods whose series caused an unexpected error. They have no sample."""


class Fan:
    """The query results of one tick by pod.

    Rows that are not series, and series of other pods, are dropped. NaN is kept; it is checked later.
    """

    def __init__(self, pods: Mapping[PodKey, Edges]) -> None:
        self._series = {pod: PodSeries(edges) for pod, edges in pods.items()}
        self._times: dict[PodKey, float] = {}
        self._disputed: set[PodKey] = set()
        self._defects: dict[PodKey, Exception] = {}
        self._backlogs: dict[ServiceName, dict[str, float]] = {}

    def take(self, name: str, rows: list[Any]) -> None:
        """Add the result of the query with this name."""
        if name == BACKLOG:
            self._take_backlogs(rows)
            return
        for pod, labels, value in _parsed(rows, "pod"):
            series = self._series.get(pod)
            if series is None:
                continue
            if name == TIMES:
                self._times[pod] = value
            elif name == DISPUTED:
                self._disputed.add(pod)
            else:
                self._add(pod, series, labels, value)

    def _add(self, pod: PodKey, series: PodSeries, labels: Mapping[str, str], value: float) -> None:
        try:
            series.add(labels.get("__name__", ""), labels, value)
        except TypeError:  # a label value that is not a string
            return
        except Exception as problem:  # noqa: BLE001 - the series of other pods are in the same rows
            self._defects[pod] = problem

    def _take_backlogs(self, rows: list[Any]) -> None:
        namespaces = {namespace for namespace, _ in self._series}
        parsed = _parsed(rows, batch_metrics.SERVICE_LABEL, batch_metrics.NAMESPACE_LABEL)
        for service, labels, value in parsed:
            if service[0] in namespaces:
                series = BACKLOG_TIME if BACKLOG_TIME in labels else str(labels.get("__name__"))
                self._backlogs.setdefault(service, {})[series] = value

    def reading(
        self, incomplete: Collection[str] = (), problems: tuple[str, ...] = ()
    ) -> PrometheusReading:
        """Return the collected samples.

        A pod has no sample if its namespace is in `incomplete`, or without a time or a known series.
        """
        samples = {
            pod: series.sample(pod[1], self._times[pod], Source.PROMETHEUS)
            for pod, series in self._series.items()
            if pod in self._times
            and not series.is_empty
            and pod[0] not in incomplete
            and pod not in self._disputed
            and pod not in self._defects
        }
        wanted = (*BACKLOG_SERIES, BACKLOG_TIME)
        backlogs = {
            service: Backlog(*(found[name] for name in wanted))
            for service, found in self._backlogs.items()
            if found.keys() >= set(wanted)
        }
        return PrometheusReading(
            samples, frozenset(self._disputed), problems, backlogs, self._defects
        )


def _parsed(
    rows: list[Any], name_label: str, namespace_label: str = "namespace"
) -> Iterator[tuple[tuple[str, str], Mapping[str, str], float]]:
    """Yield namespace and name, labels and value of each row that is a series."""
    for row in rows:
        try:
            labels, value = row["metric"], row["value"]
            if type(value) is not list or type(labels) is not dict:
                continue
            named, number = (labels[namespace_label], labels[name_label]), float(value[1])
            hash(named)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue
        yield named, labels, number
