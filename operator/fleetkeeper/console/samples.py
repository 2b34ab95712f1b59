"""The samples behind the page: the last state of the fleet, and a ring of figures per service."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleetkeeper.fleet.source import Fleet
from fleetkeeper.fleet.view import ServiceKey, ServiceView, views_of

POINTS = 360
"""Samples kept per service: half an hour at the default interval."""
UNKNOWN = math.nan

SERIES: Mapping[str, Callable[[ServiceView], float | None]] = {
    "queueWait": lambda view: in_ms(view.queue_wait.value_s),
    "batchTime": lambda view: in_ms(view.batch_time.value_s),
    "ready": lambda view: number(view.status.get("readyReplicas")),
    "wanted": lambda view: number((view.status.get("scaling") or {}).get("desired")),
    "sequences": lambda view: number((view.status.get("batching") or {}).get("sequences")),
    "tokens": lambda view: number((view.status.get("batching") or {}).get("tokens")),
    "memory": lambda view: number((view.status.get("memory") or {}).get("peakPercent")),
}
"""The figures that are kept, by their name in JSON."""


class Reader(Protocol):
    """A source of fleets, as `FleetSource`."""

    def read_fleet(self, namespace: str | None) -> Fleet:
        """Return the services with their gauges."""


def number(value: object) -> float | None:
    """Return a finite number as it is, None for anything else: JSON has no NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def in_ms(seconds: float | None) -> float | None:
    """Return seconds in milliseconds, None if they are unknown or not finite."""
    known = number(seconds)
    return None if known is None else round(known * 1e3, 3)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last state that was read. `problem` says why a newer one could not be."""

    views: Mapping[ServiceKey, ServiceView] = field(default_factory=dict)
    specs: Mapping[ServiceKey, Mapping[str, Any]] = field(default_factory=dict)
    taken: float | None = None
    remark: str = ""
    problem: str = ""


class Samples:
    """The snapshot and the rings. One thread adds, any thread reads.

    All rings have the times in common. A service that appears late has unknown figures before;
    one that is gone has no ring.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = Snapshot()
        self._times = array("d")
        self._rings: dict[ServiceKey, dict[str, array[float]]] = {}

    @property
    def snapshot(self) -> Snapshot:
        """The last state that was read."""
        return self._snapshot

    def add(self, fleet: Fleet, now: float) -> None:
        """Add what was read at this time, in seconds since 1970."""
        views = {
            (view.namespace, view.name): view
            for view in views_of(fleet.services, fleet.gauges, _figures)
        }
        specs = {
            (item["metadata"]["namespace"], item["metadata"]["name"]): item.get("spec") or {}
            for item in fleet.services
        }
        with self._lock:
            self._rings = {key: self._ring(key) for key in views}
            self._push(now, views)
            self._snapshot = Snapshot(views, specs, now, fleet.remark)

    def fail(self, problem: str, now: float) -> None:
        """Record a failed poll: keep the last sample, show the error, and leave a gap in the charts."""
        with self._lock:
            last = self._snapshot
            self._push(now, {})
            self._snapshot = Snapshot(last.views, last.specs, last.taken, last.remark, problem)

    def series(self, key: ServiceKey) -> tuple[list[float], dict[str, list[float | None]]]:
        """Return times and the figures of a service, of the same length. Unknown is None."""
        with self._lock:
            ring = self._rings.get(key, {})
            return list(self._times), {name: [number(v) for v in ring[name]] for name in ring}

    def _ring(self, key: ServiceKey) -> dict[str, array[float]]:
        unknown = [UNKNOWN] * len(self._times)
        return self._rings.get(key) or {name: array("d", unknown) for name in SERIES}

    def _push(self, now: float, views: Mapping[ServiceKey, ServiceView]) -> None:
        _append(self._times, now)
        for key, ring in self._rings.items():
            figures = _figures(views[key]) if key in views else {}
            for name in SERIES:
                figure = figures.get(name)
                _append(ring[name], UNKNOWN if figure is None else figure)


def _figures(view: ServiceView) -> dict[str, float | None]:
    return {name: figure_of(view) for name, figure_of in SERIES.items()}


def _append(ring: array[float], value: float) -> None:
    ring.append(value)
    del ring[:-POINTS]


class Sampler(threading.Thread):
    """A daemon thread that reads the fleet every few seconds: a slow API server delays no page."""

    def __init__(
        self, reader: Reader, samples: Samples, namespace: str | None, interval_s: float
    ) -> None:
        super().__init__(name="console-sampler", daemon=True)
        self._reader = reader
        self._samples = samples
        self._namespace = namespace
        self._interval_s = interval_s
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until `end`."""
        while True:
            self.sample()
            if self._ended.wait(self._interval_s):
                return

    def end(self) -> None:
        """Stop after the sample that is being taken."""
        self._ended.set()

    def sample(self) -> None:
        """Read the fleet once. A failure of any kind is shown in the page and tried again."""
        try:
            self._samples.add(self._reader.read_fleet(self._namespace), time.time())
        except Exception as problem:  # noqa: BLE001 - the page shows it; the thread must not end
            self._samples.fail(problem_text(problem), time.time())


def problem_text(problem: Exception) -> str:
    """Return the first line of an error, or its type if it has no text."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
