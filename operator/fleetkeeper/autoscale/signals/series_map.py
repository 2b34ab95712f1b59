"""Conversion of the engines' series to raw samples, by one table for both sources.

Names and labels are the engine's contract (engine_image/schemas/metrics.json); a test keeps both equal.
Series that are not in the table are ignored, so an engine may export more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fleetkeeper.autoscale.signals.histogram_edges import Edges, snap_down
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    Latencies,
    PodSample,
    Source,
    StartSeconds,
)
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S, QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import StepClass, StepSums
from fleetkeeper_contract.tiers import TIER_LABELS

PREFIX: Final = "fleetkeeper_"
QUEUE_WAIT: Final = "fleetkeeper_queue_wait_seconds"
BATCH_TIME: Final = "fleetkeeper_batch_time_seconds"
TTFT: Final = "fleetkeeper_time_to_first_token_seconds"
ITL: Final = "fleetkeeper_inter_token_latency_seconds"
STEP_MODEL: Final = "fleetkeeper_step_model_"
START: Final = "fleetkeeper_start_seconds"
STEP_CLASSES: Final = tuple(step.label for step in StepClass)
STEP_TERMS: Final[Mapping[str, tuple[str, ...]]] = {
    "decode": tuple(term for term in StepSums._fields if not term.startswith("prefill")),
    "prefill": StepSums._fields,
}
"""The sums of each step class that the step-time model needs; decode-only steps have no prefill tokens."""

Place = tuple[str, int]
"""A record (counters, gauges, latencies, start, decode, prefill) and an index in it."""


def edges_of(settings: ControlSettings) -> Edges:
    """Return the objectives, snapped down to the engines' bucket boundaries."""
    return Edges(
        snap_down(settings.queue_wait_objective_s, QUEUE_WAIT_EDGES_S),
        snap_down(settings.batch_time_objective_s, BATCH_TIME_EDGES_S),
    )


def _counter(name: str) -> Place:
    return "counters", Counters._fields.index(name)


def _gauge(name: str) -> Place:
    return "gauges", Gauges._fields.index(name)


def _latency(name: str) -> Place:
    return "latencies", Latencies._fields.index(name)


def _table() -> dict[tuple[str, str], Place]:
    places: dict[tuple[str, str], Place] = {
        (f"{BATCH_TIME}_count", ""): _counter("batch_time_count"),
        (f"{BATCH_TIME}_sum", ""): _counter("batch_time_sum_s"),
        (f"{BATCH_TIME}_bucket", ""): _counter("batch_time_within"),
        ("fleetkeeper_limit_sequences", "effective"): _gauge("limit_sequences"),
        ("fleetkeeper_limit_tokens", "effective"): _gauge("limit_tokens"),
        ("fleetkeeper_limit_generation", "applied"): _gauge("limit_generation"),
        ("fleetkeeper_kv_capacity_tokens", ""): _gauge("kv_capacity_tokens"),
        ("fleetkeeper_kv_resident_tokens", ""): _gauge("kv_resident_tokens"),
        ("fleetkeeper_memory_used_ratio", ""): _gauge("memory_used_ratio"),
        ("fleetkeeper_memory_peak_ratio", ""): _gauge("memory_peak_ratio"),
        ("fleetkeeper_memory_own", ""): _gauge("memory_own"),
        ("fleetkeeper_memory_fragmentation_ratio", ""): _gauge("memory_fragmentation_ratio"),
        ("fleetkeeper_live_limits_supported", ""): _gauge("live_limits"),
        ("fleetkeeper_hung", ""): _gauge("hung"),
        ("fleetkeeper_grants_demanded", ""): _gauge("grants_demanded"),
        ("fleetkeeper_idle_seconds", ""): _gauge("idle_s"),
    }
    for name in ("steps", "schedule_calls", "prompt_tokens", "generation_tokens", "preemptions"):
        places[f"fleetkeeper_{name}_total", ""] = _counter(name)
    for tier in TIER_LABELS:
        places[f"{QUEUE_WAIT}_count", tier] = _counter(f"wait_count_{tier}")
        places[f"{QUEUE_WAIT}_sum", tier] = _counter(f"wait_sum_s_{tier}")
        places[f"{QUEUE_WAIT}_bucket", tier] = _counter(f"wait_within_{tier}")
        for name, short in ((TTFT, "ttft"), (ITL, "itl")):
            places[f"{name}_count", tier] = _latency(f"{short}_count_{tier}")
            places[f"{name}_sum", tier] = _latency(f"{short}_sum_s_{tier}")
        places["fleetkeeper_arrivals_total", tier] = _counter(f"arrivals_{tier}")
        places["fleetkeeper_arrivals_squared_total", tier] = _counter("arrivals_squared")
        places["fleetkeeper_waiting", tier] = _gauge(f"waiting_{tier}")
        places["fleetkeeper_running", tier] = _gauge("running")
        places["fleetkeeper_oldest_wait_seconds", tier] = _gauge(f"oldest_wait_s_{tier}")
    for index, stage in enumerate(StartSeconds._fields):
        places[START, stage] = ("start", index)
    for step_class in STEP_CLASSES:
        for index, term in enumerate(StepSums._fields):
            places[f"{STEP_MODEL}{term}_total", step_class] = (step_class, index)
    return places


PLACES: Final[Mapping[tuple[str, str], Place]] = _table()
"""(series name, value of its label tier, kind or step_class) -> place. Series of one place are summed."""

OPTIONAL: Final = frozenset(
    {
        "fleetkeeper_memory_used_ratio",
        "fleetkeeper_memory_peak_ratio",
        "fleetkeeper_memory_own",
        "fleetkeeper_memory_fragmentation_ratio",
        "fleetkeeper_live_limits_supported",
        "fleetkeeper_hung",
        "fleetkeeper_grants_demanded",
        "fleetkeeper_idle_seconds",
        *(name for name, _ in PLACES if name.startswith((STEP_MODEL, TTFT, ITL, START))),
    }
)
"""Names of series that decisions do not require."""

SINGLE: Final = frozenset({"fleetkeeper_live_limits_supported", "fleetkeeper_memory_own"})
"""Names of series that replace the value of an engine without them, which is not 0."""
REQUIRED: Final = frozenset(name for name, _ in PLACES) - OPTIONAL
SERIES: Final = frozenset(name for name, _ in PLACES)
SHOWN: Final = frozenset(name for name, _ in PLACES if name.startswith((TTFT, ITL, START)))
"""Names of series that no decision uses."""
_LENGTHS: Final = {"latencies": len(Latencies._fields), "start": len(StartSeconds._fields)}
BUCKETS: Final = frozenset({f"{QUEUE_WAIT}_bucket", f"{BATCH_TIME}_bucket"})
LABELS: Final = ("tier", "kind", "step_class", "stage")


class PodSeries:
    """A collector for the series of one pod; `sample` returns them as one value."""

    __slots__ = ("_edges", "_names", "_records")

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._names: set[str] = set()
        self._records: dict[str, list[float]] = {
            "counters": [0.0] * len(Counters._fields),
            "gauges": list(Gauges()),
        }

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add one series; ignore it if it is not in the table or is another bucket."""
        key = next((labels[label] for label in LABELS if labels.get(label)), "")
        place = PLACES.get((name, key))
        if place is None:
            return
        if name in BUCKETS and not self._is_edge(name, labels.get("le", "")):
            return
        record, index = place
        sums = self._records.get(record)
        if sums is None:
            length = _LENGTHS.get(record, len(StepSums._fields))
            sums = self._records[record] = [0.0] * length
        if name in SINGLE:
            sums[index] = value
        else:
            sums[index] += value
        self._names.add(name)

    def _is_edge(self, name: str, le: str) -> bool:
        edge = self._edges.queue_wait_s if name.startswith(QUEUE_WAIT) else self._edges.batch_time_s
        try:
            return abs(float(le) - edge) <= 1e-6 * edge
        except ValueError:
            return False

    @property
    def is_empty(self) -> bool:
        """Return whether no series of the table was added."""
        return not self._names

    def sample(self, pod: str, time: float, source: Source) -> PodSample:
        """Return the sample, including the names of required series that are missing."""
        decode, prefill = (self._records.get(step_class) for step_class in STEP_CLASSES)
        latencies, start = self._records.get("latencies"), self._records.get("start")
        return PodSample(
            pod,
            time,
            Counters._make(self._records["counters"]),
            Gauges._make(self._records["gauges"]),
            StepSums._make(decode) if decode else None,
            StepSums._make(prefill) if prefill else None,
            source,
            tuple(sorted(REQUIRED - self._names)) if not self._names >= REQUIRED else (),
            self._edges,
            Latencies._make(latencies) if latencies else None,
            StartSeconds._make(start) if start else None,
        )


def sample_of(
    pod: str,
    time: float,
    series: Iterable[tuple[str, Mapping[str, str], float]],
    edges: Edges,
    source: Source,
) -> PodSample:
    """Return the sample of one pod from its series (name, labels, value)."""
    collected = PodSeries(edges)
    for name, labels, value in series:
        collected.add(name, labels, value)
    return collected.sample(pod, time, source)
