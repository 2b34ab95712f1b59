"""Raw samples of pods, the common form of both sources (Prometheus, direct reads).

A scrape is atomic, so all values of a pod share one timestamp. Counters are cumulative, as exported.
The control loop computes rates from successive samples; the source never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import lt
from typing import NamedTuple

from fleetkeeper.autoscale.constants import MAX_COUNTER, MAX_KV_RATIO
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper_contract.step_terms import StepSums


class Source(StrEnum):
    """The source of a sample."""

    PROMETHEUS = "Prometheus"
    DIRECT = "Direct"


class Counters(NamedTuple):
    """Cumulative values of one pod: seconds, requests, steps, tokens.

    `within`: not above the bucket boundary of the objective.
    """

    wait_count_realtime: float = 0.0
    wait_count_standard: float = 0.0
    wait_count_batch: float = 0.0
    wait_sum_s_realtime: float = 0.0
    wait_sum_s_standard: float = 0.0
    wait_sum_s_batch: float = 0.0
    wait_within_realtime: float = 0.0
    wait_within_standard: float = 0.0
    wait_within_batch: float = 0.0
    arrivals_realtime: float = 0.0
    arrivals_standard: float = 0.0
    arrivals_batch: float = 0.0
    arrivals_squared: float = 0.0
    batch_time_count: float = 0.0
    batch_time_sum_s: float = 0.0
    batch_time_within: float = 0.0
    steps: float = 0.0
    schedule_calls: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    preemptions: float = 0.0


WITHIN = tuple(name for name in Counters._fields if "within" in name)
"""The counters that depend on the objectives."""


class Gauges(NamedTuple):
    """Current values of one pod: requests, seconds, tokens, ratios."""

    waiting_realtime: float = 0.0
    waiting_standard: float = 0.0
    waiting_batch: float = 0.0
    running: float = 0.0
    oldest_wait_s_realtime: float = 0.0
    oldest_wait_s_standard: float = 0.0
    oldest_wait_s_batch: float = 0.0
    limit_sequences: float = 0.0
    limit_tokens: float = 0.0
    limit_generation: float = 0.0
    kv_capacity_tokens: float = 0.0
    kv_resident_tokens: float = 0.0
    memory_used_ratio: float = 0.0
    memory_peak_ratio: float = 0.0
    memory_own: float = 1.0
    live_limits: float = 1.0
    memory_fragmentation_ratio: float = 0.0
    hung: float = 0.0
    grants_demanded: float = 0.0
    idle_s: float = 0.0
    """Time without a request; also 0 if the engine does not export it."""

    @property
    def has_requests(self) -> bool:
        """Return whether a request runs or waits."""
        waiting = self.waiting_realtime + self.waiting_standard + self.waiting_batch
        return self.running + waiting > 0


class Latencies(NamedTuple):
    """Cumulative TTFT and ITL of one pod's streamed answers: requests, gaps between frames, seconds.

    Four groups of three tiers. They are not part of `Counters`, because engines of older images do not export them, and no decision
    uses them.
    """

    ttft_count_realtime: float = 0.0
    ttft_count_standard: float = 0.0
    ttft_count_batch: float = 0.0
    ttft_sum_s_realtime: float = 0.0
    ttft_sum_s_standard: float = 0.0
    ttft_sum_s_batch: float = 0.0
    itl_count_realtime: float = 0.0
    itl_count_standard: float = 0.0
    itl_count_batch: float = 0.0
    itl_sum_s_realtime: float = 0.0
    itl_sum_s_standard: float = 0.0
    itl_sum_s_batch: float = 0.0


class StartSeconds(NamedTuple):
    """Seconds of each stage of an engine's start, in order; 0 for a stage that has not begun."""

    weights: float = 0.0
    load: float = 0.0
    warm_up: float = 0.0


@dataclass(frozen=True, slots=True)
class PodSample:
    """One scrape of one pod. A source may leave out `decode`, `prefill` and `latencies`."""

    pod: str
    time: float
    counters: Counters
    gauges: Gauges
    decode: StepSums | None = None
    """Sums for the step-time model."""
    prefill: StepSums | None = None
    """Sums for the step-time model."""
    source: Source = Source.PROMETHEUS
    missing: tuple[str, ...] = ()
    """Required metrics that the engine does not export."""
    edges: Edges | None = None
    """The bucket boundaries at which `within` was counted; they follow the objectives in the spec."""
    latencies: Latencies | None = None
    start: StartSeconds | None = None
    """None if it was not read."""


def _are_finite(values: Sequence[float], limit: float) -> bool:
    """Return whether every value is between 0 and `limit`; a NaN makes the sum NaN, which compares false."""
    return 0.0 <= sum(values) <= limit and min(values) >= 0.0


def why_impossible(sample: PodSample, batch_time_limit_s: float, previous: PodSample | None) -> str:
    """Return why a sample is impossible, or an empty string.

    NaN, infinite and negative values fail the same comparison. `batch_time_limit_s`: the longest
    plausible mean step between `previous` and this sample; infinite while unknown.
    """
    if not math.isfinite(sample.time):
        return "the timestamp is not a number"
    if not _are_finite(sample.counters, MAX_COUNTER) or not _are_finite(sample.gauges, MAX_COUNTER):
        return "a value is negative, infinite or not a number"
    gauges = sample.gauges
    if gauges.kv_resident_tokens > MAX_KV_RATIO * gauges.kv_capacity_tokens > 0.0:
        return "there are more KV tokens than the cache can hold"
    if previous is not None:
        steps = sample.counters.batch_time_count - previous.counters.batch_time_count
        spent_s = sample.counters.batch_time_sum_s - previous.counters.batch_time_sum_s
        if steps > 0 and spent_s > batch_time_limit_s * steps:
            return "the mean step took more than ten times the slowest seen"
    return ""


def is_reset(sample: PodSample, previous: PodSample) -> bool:
    """Return whether a counter went backward: the engine restarted between the two scrapes."""
    return any(map(lt, sample.counters, previous.counters))
