"""Distribution of one tick's query results to their pods, as they arrive, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.adapters.prometheus.queries import DISPUTED, TIMES
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.signals.series_map import PodSeries

PodKey = tuple[str, str]
"""Namespace and name of a pod."""


@dataclass(frozen=True, slots=True)
class PrometheusReading:
    """The samples that Prometheus has now.

    `disputed`: pods with more than one series where one is expected; they have no sample.
    `problems`: one message for each query that gave nothing for some pods.
    """

    samples: Mapping[PodKey, PodSample]
    disputed: frozenset[PodKey] = frozenset()
    problems: tuple[str, ...] = ()


class Fan:
    """The query results of one tick by pod.

    Rows that are not series, and series of other pods, are dropped. NaN is kept; it is checked
    later. A result that arrives after the call of `reading` is dropped too.
    """

    def __init__(self, pods: Mapping[PodKey, Edges]) -> None:
        self._series = {pod: PodSeries(edges) for pod, edges in pods.items()}
        self._times: dict[PodKey, float] = {}
        self._disputed: set[PodKey] = set()
        self._lock = threading.Lock()
        self._is_open = True

    def take(self, name: str, rows: list[Any]) -> None:
        """Add the result of the query with this name."""
        with self._lock:
            if not self._is_open:
                return
            for pod, labels, value in _parsed(rows):
                series = self._series.get(pod)
                if series is None:
                    continue
                if name == TIMES:
                    self._times[pod] = value
                elif name == DISPUTED:
                    self._disputed.add(pod)
                else:
                    _add(series, labels, value)

    def reading(
        self, incomplete: Collection[str] = (), problems: tuple[str, ...] = ()
    ) -> PrometheusReading:
        """Return the collected samples.

        A pod has no sample if its namespace is in `incomplete`, or without a time or a known series.
        """
        with self._lock:
            self._is_open = False
        samples = {
            pod: series.sample(pod[1], self._times[pod], Source.PROMETHEUS)
            for pod, series in self._series.items()
            if pod in self._times
            and not series.is_empty
            and pod[0] not in incomplete
            and pod not in self._disputed
        }
        return PrometheusReading(samples, frozenset(self._disputed), problems)


def _add(series: PodSeries, labels: Mapping[str, str], value: float) -> None:
    try:
        series.add(labels.get("__name__", ""), labels, value)
    except TypeError:  # a label value that is not a string
        return


def _parsed(rows: list[Any]) -> Iterator[tuple[PodKey, Mapping[str, str], float]]:
    """Yield pod, labels and value of each row that is a series."""
    for row in rows:
        try:
            labels, value = row["metric"], row["value"]
            if type(value) is not list or type(labels) is not dict:
                continue
            pod, number = (labels["namespace"], labels["pod"]), float(value[1])
            hash(pod)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue
        yield pod, labels, number
