"""Hardware and mean requests of a running service, from the counters that its engines have in Prometheus."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from fleetkeeper.adapters.prometheus.queries import label_value
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import Counters, PodSample, Source
from fleetkeeper.autoscale.signals.series_map import PodSeries
from fleetkeeper.autoscale.signals.windows import NO_STEPS, Window
from fleetkeeper.commands.fleet.prometheus_history import HistoryError, PrometheusHistory
from fleetkeeper.simulate.hardware import fit_of_sums, model_of_sums
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_steps.hardware import Hardware, InvalidHardware

POINT_S: Final = 60.0
MAX_POINTS: Final = 720
DEADLINE_S: Final = 60.0
NAMES: Final = (
    "step_model_[a-z_]+_total|(prompt|generation)_tokens_total|queue_wait_seconds_count"
    "|arrivals_total|kv_capacity_tokens"
)
NO_EDGES: Final = Edges(0.0, 0.0)


class NoFit(ValueError):
    """The lack of usable measurements. The message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The measured values of a service: hardware, mean tokens of a request, requests per second."""

    hardware: Hardware
    prompt_tokens: float
    output_tokens: float
    requests_per_s: float


def fit_from_prometheus(url: str, namespace: str, name: str, hours: float) -> Fitted:
    """Return the fit of the last `hours` of a service.

    Raises:
        NoFit: Prometheus did not answer, or has too few measurements of the service.
    """
    try:
        history = PrometheusHistory(url, deadline_s=DEADLINE_S)
    except ValueError as problem:
        raise NoFit(f"--fit-from-prometheus {problem}") from None
    end = time.time()
    begin = end - 3600 * hours
    step_s = max(POINT_S, 3600 * hours / MAX_POINTS)
    scope = f'namespace="{label_value(namespace)}", inference_service="{label_value(name)}"'
    query = (
        f'max by (__name__, pod, tier, step_class) ({{__name__=~"fleetkeeper_({NAMES})", {scope}}})'
    )
    try:
        rows = history.range(query, begin, end, step_s)
        cold_start_s = _cold_start_s(history, namespace, name)
    except HistoryError as problem:
        raise NoFit(str(problem)) from None
    if not rows:
        raise NoFit(
            f"Prometheus has no engine metrics of {namespace}/{name} in the last {hours:g} h; check the names and --fit-hours"
        )
    return fitted(f"{namespace}/{name}", rows, cold_start_s)


def fitted(service: str, rows: Sequence[Mapping[str, Any]], cold_start_s: float | None) -> Fitted:
    """Return the fit of the series of a service's engines (rows of a range query).

    Raises:
        NoFit: there are too few steps or requests.
    """
    samples = _samples(rows)
    windows, total, seconds = _windows(samples)
    requests_seen = sum(getattr(total, f"wait_count_{tier}") for tier in TIER_LABELS)
    capacities = [row.gauges.kv_capacity_tokens for pod in samples.values() for row in pod]
    capacity = min([value for value in capacities if value > 0], default=0.0)
    if not (requests_seen and capacity):
        raise NoFit(
            f"{service}: no request and no KV capacity were measured; use a period with load (--fit-hours)"
        )
    more = {} if cold_start_s is None else {"cold_start_s": cold_start_s}
    try:
        hardware = fit_of_sums(
            model_of_sums(windows), kv_capacity_tokens=capacity, name=service, **more
        )
    except InvalidHardware as problem:
        raise NoFit(str(problem)) from problem
    arrivals = sum(getattr(total, f"arrivals_{tier}") for tier in TIER_LABELS)
    return Fitted(
        hardware,
        total.prompt_tokens / requests_seen,
        max(1.0, total.generation_tokens / requests_seen),
        arrivals / seconds if seconds else 0.0,
    )


Samples = Mapping[str, Sequence[PodSample]]
"""The samples of each pod in the order of time."""


def _samples(rows: Iterable[Mapping[str, Any]]) -> Samples:
    series: dict[tuple[str, float], PodSeries] = {}
    for row in rows:
        labels = row["metric"]
        for at, value in row["values"]:
            key = (str(labels.get("pod", "")), float(at))
            series.setdefault(key, PodSeries(NO_EDGES)).add(
                labels.get("__name__", ""), labels, float(value)
            )
    by_pod: dict[str, list[PodSample]] = defaultdict(list)
    for pod, at in sorted(series):
        by_pod[pod].append(series[pod, at].sample(pod, at, Source.PROMETHEUS))
    return by_pod


def _windows(samples: Samples) -> tuple[list[Window], Counters, float]:
    """Return one window per interval over all pods, the sums of the counters, and the seconds covered."""
    decode: dict[tuple[float, float], StepSums] = defaultdict(StepSums)
    prefill: dict[tuple[float, float], StepSums] = defaultdict(StepSums)
    total = Counters()
    for rows in samples.values():
        for before, after in pairwise(rows):
            span = (before.time, after.time)
            decode[span] = _plus(decode[span], _grown(before.decode, after.decode))
            prefill[span] = _plus(prefill[span], _grown(before.prefill, after.prefill))
            delta = Counters._make(
                b - a for a, b in zip(before.counters, after.counters, strict=True)
            )
            if min(delta) >= 0:  # else the engine restarted in between
                total = Counters._make(a + b for a, b in zip(total, delta, strict=True))
    windows = [
        Window(start, end, decode=decode[start, end], prefill=prefill[start, end])
        for start, end in sorted(decode)
    ]
    times = [time for span in decode for time in span]
    return windows, total, max(times) - min(times) if times else 0.0


def _grown(before: StepSums | None, after: StepSums | None) -> StepSums:
    if before is None or after is None:
        return NO_STEPS
    delta = StepSums._make(b - a for a, b in zip(before, after, strict=True))
    return delta if min(delta) >= 0 else NO_STEPS


def _plus(a: StepSums, b: StepSums) -> StepSums:
    return StepSums._make(x + y for x, y in zip(a, b, strict=True))


def _cold_start_s(history: PrometheusHistory, namespace: str, name: str) -> float | None:
    """Return the cold start that the operator measured; None if it exports none."""
    which = f'inference_service="{label_value(name)}"'
    query = " or ".join(
        f'fleetkeeper_cold_start_seconds{{{which}, {label}="{label_value(namespace)}"}}'
        for label in ("namespace", "exported_namespace")
    )
    now = time.time()
    rows = history.range(f"max({query})", now, now, 1.0)
    values = [float(value) for row in rows for _, value in row["values"]]
    return values[-1] if values else None
