"""Metrics of the batch process. No label holds a key or a text of a client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fleetkeeper_contract.batch_metrics import (
    BACKLOG_TOKENS,
    DEADLINE,
    NAMESPACE_LABEL,
    REMAINING_LINES,
    REQUIRED_RATE,
    SERVICE_LABEL,
)

LINES: Final = Counter(
    "fleetkeeper_gateway_batch_lines_total",
    "Attempts at lines by outcome: ok and error are results; failed attempts, refused ones (refused: by the "
    "service; key_refused: because of the key; asleep: because the service sleeps or swaps) and those whose input could not "
    "be read (unread) or that a shutdown or a lack of memory ended (stopped) are made again.",
    ("outcome",),
)
DUPLICATES: Final = Counter(
    "fleetkeeper_gateway_batch_duplicate_results_total",
    "Results that were computed for a line that had one already.",
)
STORE_FAILURES: Final = Counter(
    "fleetkeeper_gateway_batch_store_failures_total",
    "Calls to the store of files that failed, by what they were for. They are made again.",
    ("what",),
)
QUEUE_FAILURES: Final = Counter(
    "fleetkeeper_gateway_batch_calls_without_queue_total",
    "Calls to the queue that Redis did not answer, by what they were for.",
    ("what",),
)
QUEUE_UP: Final = Gauge(
    "fleetkeeper_gateway_batch_queue_up",
    "1 if this process takes chunks; 0 if Redis does not answer, or is not fit for the queue.",
)
QUEUE_ENDS: Final = Counter(
    "fleetkeeper_gateway_batch_queue_failures",
    "Connections to Redis that failed, or were given up because the server is not fit.",
)
DEFECTS: Final = Counter(
    "fleetkeeper_gateway_batch_defects_total",
    "Unexpected failures of the work for one batch or its lines. Others went on; the log has the reason.",
    ("what",),
)
BATCHES: Final = Counter(
    "fleetkeeper_gateway_batch_batches_total", "Batches that ended, by their status.", ("status",)
)
LINE_SECONDS: Final = Histogram(
    "fleetkeeper_gateway_batch_line_seconds",
    "Time from sending a line to its whole answer.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
_MIN_S: Final = 1.0
"""Minimum distance of a deadline in the required rate; nearer and past deadlines count as this far."""


@dataclass(frozen=True, slots=True)
class Due:
    """The unfinished work of one batch."""

    lines: int
    tokens: float
    deadline: float
    """Unix seconds."""


_PLACE: Final = (NAMESPACE_LABEL, SERVICE_LABEL)
BACKLOG: Final = Gauge(BACKLOG_TOKENS, "Estimated tokens of all lines without a result.", _PLACE)
REMAINING: Final = Gauge(REMAINING_LINES, "Lines without a result.", _PLACE)
EARLIEST: Final = Gauge(DEADLINE, "Earliest end of a completion window, in Unix seconds.", _PLACE)
RATE: Final = Gauge(REQUIRED_RATE, "Least tokens per second that meet every deadline.", _PLACE)


def show_backlog(due: Mapping[tuple[str, str], Collection[Due]], now: float) -> None:
    """Set the backlog series to these services (namespace and name), and remove all others.

    Args:
        due: unfinished work by service.
        now: Unix seconds.
    """
    for gauge in (BACKLOG, REMAINING, EARLIEST, RATE):
        gauge.clear()
    for place, found in due.items():
        BACKLOG.labels(*place).set(sum(batch.tokens for batch in found))
        REMAINING.labels(*place).set(sum(batch.lines for batch in found))
        EARLIEST.labels(*place).set(min(batch.deadline for batch in found))
        RATE.labels(*place).set(required_rate(found, now))


def required_rate(due: Iterable[Due], now: float) -> float:
    """Return the minimum rate, in tokens per second, that meets every deadline.

    >>> required_rate([Due(1, 100, 10.0), Due(1, 300, 20.0)], now=0.0)
    20.0
    """
    rate, tokens = 0.0, 0.0
    for batch in sorted(due, key=lambda batch: batch.deadline):
        tokens += batch.tokens
        rate = max(rate, tokens / max(_MIN_S, batch.deadline - now))
    return rate


RUNNING: Final = Gauge(
    "fleetkeeper_gateway_batch_running_lines", "Lines of this replica that are being answered."
)
CONCURRENCY: Final = Gauge(
    "fleetkeeper_gateway_batch_concurrency",
    "Most lines that the worker processes may send at the same time now, each for itself and over all services: "
    "it follows 429 and 503. BATCH_CONCURRENCY bounds the lines of all of them.",
)
DEATHS: Final = Counter(
    "fleetkeeper_gateway_batch_worker_deaths_total",
    "Worker processes that ended, or were killed because they hung, by whether one handled an answer meanwhile: "
    "then the line has a failed attempt.",
    ("handled",),
)

_PREFIX: Final = "fleetkeeper_gateway_batch_"
_SUMS: Final = frozenset({f"{_PREFIX}running_lines", f"{_PREFIX}concurrency"})
"""The gauges of worker processes that are summed for the replica."""

Series = tuple[str, str, tuple[tuple[str, str], ...]]
"""Name of a metric, name of a series, and its labels."""


def measured() -> list[tuple[Series, float]]:
    """Return the counts of this worker process, for `OfAllProcesses`."""
    return [
        ((family.name, sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in REGISTRY.collect()
        if family.name.startswith(_PREFIX) and (family.type != "gauge" or family.name in _SUMS)
        for sample in family.samples
        if sample.value and not sample.name.endswith("_created")
    ]


class OfAllProcesses(Collector):
    """The metrics of this process, summed with those of its worker processes. Counters of ended ones stay."""

    def __init__(self, registry: Collector = REGISTRY) -> None:
        self._registry = registry
        self._ended: dict[Series, float] = {}
        self._now: dict[int, dict[Series, float]] = {}

    def note(self, index: int, found: Iterable[tuple[Series, float]]) -> None:
        """Store the counts of a worker process since its start, decoded from JSON."""
        self._now[index] = {
            (family, name, tuple((label, text) for label, text in labels)): value
            for (family, name, labels), value in found
        }

    def end(self, index: int) -> None:
        """Note that a worker process has ended."""
        for series, value in self._now.pop(index, {}).items():
            if series[0] not in _SUMS:
                self._ended[series] = self._ended.get(series, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """Return the series."""
        more: dict[str, dict[Series, float]] = {}
        for found in (self._ended, *self._now.values()):
            for series, value in found.items():
                family = more.setdefault(series[0], {})
                family[series] = family.get(series, 0.0) + value
        for metric in self._registry.collect():
            theirs = more.get(metric.name, {})
            metric.samples = [
                sample._replace(
                    value=sample.value
                    + theirs.pop(
                        (metric.name, sample.name, tuple(sorted(sample.labels.items()))), 0
                    )
                )
                for sample in metric.samples
            ]
            for (_, name, labels), value in theirs.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
