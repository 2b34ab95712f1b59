"""Metrics of the batch process. No label holds a key or a text of a client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
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
    "Attempts at lines by outcome: ok and error are results; failed attempts, refused ones and those "
    "whose input could not be read (unread) or that a shutdown ended (stopped) are made again.",
    ("outcome",),
)
SEGMENTS: Final = Counter(
    "fleetkeeper_gateway_batch_segments_total", "Segments with results that were written."
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
    "Calls to the queue that found Redis down or being rebuilt, by what they were for.",
    ("what",),
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
_LEAST_S: Final = 1.0
"""A deadline that is nearer, or past, counts as this far."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is left of one batch."""

    lines: int
    tokens: float
    deadline: float
    """Unix seconds."""


class Backlog(Collector):
    """What waits for each service, exported by the process that leads."""

    def __init__(self) -> None:
        self._due: Mapping[tuple[str, str], tuple[Due, ...]] = {}
        self._at = 0.0

    def show(self, due: Mapping[tuple[str, str], Iterable[Due]], now: float) -> None:
        """Export what is left by namespace and name of the service.

        Args:
            due: what is left.
            now: Unix seconds.
        """
        self._due = {place: tuple(found) for place, found in due.items()}
        self._at = now

    def collect(self) -> Iterator[Metric]:
        """Return the series."""
        labels = (NAMESPACE_LABEL, SERVICE_LABEL)
        tokens = GaugeMetricFamily(
            BACKLOG_TOKENS, "Estimated tokens of all lines without a result.", labels=labels
        )
        lines = GaugeMetricFamily(REMAINING_LINES, "Lines without a result.", labels=labels)
        deadline = GaugeMetricFamily(
            DEADLINE, "Earliest end of a completion window, in Unix seconds.", labels=labels
        )
        rate = GaugeMetricFamily(
            REQUIRED_RATE, "Least tokens per second that meet every deadline.", labels=labels
        )
        for place, due in self._due.items():
            tokens.add_metric(place, sum(one.tokens for one in due))
            lines.add_metric(place, sum(one.lines for one in due))
            deadline.add_metric(place, min(one.deadline for one in due))
            rate.add_metric(place, required_rate(due, self._at))
        yield from (tokens, lines, deadline, rate)


def required_rate(due: Iterable[Due], now: float) -> float:
    """Return the least rate, in tokens per second, that meets every deadline.

    >>> required_rate([Due(1, 100, 10.0), Due(1, 300, 20.0)], now=0.0)
    20.0
    """
    rate, tokens = 0.0, 0.0
    for one in sorted(due, key=lambda one: one.deadline):
        tokens += one.tokens
        rate = max(rate, tokens / max(_LEAST_S, one.deadline - now))
    return rate


RUNNING: Final = Gauge(
    "fleetkeeper_gateway_batch_running_lines", "Lines of this process that are being answered."
)
CONCURRENCY: Final = Gauge(
    "fleetkeeper_gateway_batch_concurrency",
    "Most lines that this process may send at the same time now, over all models: it follows 429 and 503.",
)
BACKLOG: Final = Backlog()
REGISTRY.register(BACKLOG)
