"""The history of a service from Prometheus: one range query for all charts of the page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fleetkeeper.console.samples import number, problem_text
from fleetkeeper.fleet.view import ServiceKey

HOURS: Final = (1, 6, 24)
POINTS: Final = 240
"""Maximum points of each series: a chart is a few hundred pixels wide."""
SCRAPE_S: Final = 60.0
"""The longest time between two scrapes of a target."""
DECISIONS: Final = "decisions"
SERVICE: Final = "service_namespace={namespace}, inference_service={name}"
ENGINES: Final = "namespace={namespace}, inference_service={name}"
QUERIES: Final[Mapping[str, str]] = {
    "queueWait": "1000 * max(fleetkeeper_signal_queue_wait_seconds{SERVICE})",
    "queueWaitObjective": "1000 * max(fleetkeeper_objective_queue_wait_seconds{SERVICE})",
    "batchTime": "1000 * max(fleetkeeper_signal_batch_time_seconds{SERVICE})",
    "batchTimeObjective": "1000 * max(fleetkeeper_objective_batch_time_seconds{SERVICE})",
    "ready": 'max(fleetkeeper_decision_replicas{SERVICE, kind="ready"})',
    "wanted": 'max(fleetkeeper_decision_replicas{SERVICE, kind="allocated"})',
    "maxReplicas": "max(fleetkeeper_service_max_replicas{SERVICE})",
    "sequences": "max(fleetkeeper_decision_limit_sequences{SERVICE})",
    "tokens": "max(fleetkeeper_decision_limit_tokens{SERVICE})",
    "memory": "100 * max(fleetkeeper_memory_peak_ratio{ENGINES})",
    "arriving": "sum(rate(fleetkeeper_arrivals_total{ENGINES}[WINDOW]))",
    "refused": 'sum(rate(fleetkeeper_requests_total{ENGINES, outcome!="admitted"}[WINDOW]))',
    DECISIONS: "sum by (subject) (increase(fleetkeeper_service_decisions_total{SERVICE}[WINDOW])) > 0",
}
"""By the names in JSON. SERVICE, ENGINES and WINDOW are replaced."""

Document = dict[str, Any]
Row = Mapping[str, Any]


class RangeReader(Protocol):
    """A Prometheus, as `PrometheusHistory`."""

    def range(self, query: str, begin: float, end: float, step_s: float) -> Sequence[Row]:
        """Return the series of a range query; raise with the reason if there is no answer."""


@dataclass(frozen=True, slots=True)
class Span:
    """The times of a history: multiples of the step, so that points stay where they are."""

    hours: int
    end: float

    @classmethod
    def until(cls, now: float, hours: int) -> Span:
        """Return the span that ends at the last multiple of its step."""
        step_s = 3600.0 * hours / POINTS
        return cls(hours, now // step_s * step_s)

    @property
    def step_s(self) -> float:
        """The time between two points."""
        return 3600.0 * self.hours / POINTS

    @property
    def window_s(self) -> float:
        """The window of rates and increases: any two scrapes in a row are in the window of some point."""
        return SCRAPE_S + max(self.step_s, SCRAPE_S)

    @property
    def begin(self) -> float:
        """The time of the first point."""
        return self.end - 3600.0 * self.hours

    def times(self) -> list[float]:
        """Return the times of all points."""
        return [self.begin + index * self.step_s for index in range(POINTS + 1)]

    def on_grid(self, values: Iterable[tuple[float, str]]) -> list[float | None]:
        """Return a value for each point, None where there is none."""
        found: list[float | None] = [None] * (POINTS + 1)
        for at, text in values:
            index = round((at - self.begin) / self.step_s)
            if 0 <= index <= POINTS:
                found[index] = number(round(float(text), 4))
        return found


def query_text(key: ServiceKey, span: Span) -> str:
    """Return one query for all series, which the label `series` distinguishes."""
    namespace, name = (json.dumps(text, ensure_ascii=False) for text in key)
    parts = []
    for series, query in QUERIES.items():
        for word, labels in (("SERVICE", SERVICE), ("ENGINES", ENGINES)):
            query = query.replace(word, labels)  # noqa: PLW2901 - the same query, more of it replaced
        query = query.replace("WINDOW", f"{span.window_s:.0f}s")  # noqa: PLW2901
        query = query.replace("{namespace}", namespace).replace("{name}", name)  # noqa: PLW2901
        parts.append(f'label_replace({query}, "series", "{series}", "", "")')
    return " or ".join(parts)


def marks_of(rows: Iterable[Row], span: Span) -> list[Document]:
    """Return when decisions were made, oldest first, each within a window before its time.

    A decision is in the windows of several points. So a subject has one mark in each window.
    """
    marks: list[Document] = []
    for row in rows:
        last = -span.window_s
        for at, _ in row["values"]:
            if at - last >= span.window_s:
                marks.append({"time": float(at), "what": str(row["metric"].get("subject", ""))})
                last = at
    return sorted(marks, key=lambda mark: mark["time"])


class History:
    """The histories that the page asks for. Several threads may ask; Prometheus is asked once per step."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._last: tuple[ServiceKey, Span, Document] | None = None

    def document(self, key: ServiceKey, hours: int, now: float) -> Document:
        """Return the history of a service. `problem` says why there is none."""
        span = Span.until(now, hours)
        with self._lock:
            if self._last is None or self._last[:2] != (key, span):
                document = self._read(key, span)
                if document["problem"]:
                    return document
                self._last = key, span, document
            return self._last[2]

    def _read(self, key: ServiceKey, span: Span) -> Document:
        rows: Sequence[Row] = ()
        problem = ""
        try:
            rows = self._reader.range(query_text(key, span), span.begin, span.end, span.step_s)
        except Exception as failure:  # noqa: BLE001 - the page shows it and asks again
            problem = problem_text(failure)
        by_series: dict[str, list[Row]] = {name: [] for name in QUERIES}
        for row in rows:
            by_series.setdefault(str(row["metric"].get("series")), []).append(row)
        decisions = by_series.pop(DECISIONS)
        series = {
            name: span.on_grid(pair for row in found for pair in row["values"])
            for name, found in by_series.items()
        }
        return {
            "hours": span.hours,
            "times": span.times(),
            "series": series,
            "marks": marks_of(decisions, span),
            "problem": problem,
        }
