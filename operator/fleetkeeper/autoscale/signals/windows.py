"""Disjoint windows of 10 s in which SLO attainment is counted and judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add, sub

from fleetkeeper.autoscale.constants import MAX_SUM, MIN_REQUESTS, MIN_SPAN_S, MIN_STEPS
from fleetkeeper.autoscale.signals.pod_history import PodTrack
from fleetkeeper.autoscale.signals.samples import Counters, PodSample
from fleetkeeper_contract.step_terms import StepSums

NO_STEPS = StepSums()


@dataclass(frozen=True, slots=True)
class PodWindow:
    """Steps of one pod in a window, and those of them within the batch time objective."""

    pod: str
    steps: float
    within: float


@dataclass(frozen=True, slots=True)
class Window:
    """The counts of a service between `start` and `end` (scrape times, seconds)."""

    start: float
    end: float
    scheduled: float = 0.0
    """Requests of all tiers."""
    requests: float = 0.0
    """Requests of the judged tiers: realtime and standard, or batch if there is no other traffic."""
    waited_within: float = 0.0
    """The part of `requests` within the queue wait objective."""
    steps: float = 0.0
    steps_within: float = 0.0
    seconds: float = 0.0
    """Sum of batch times."""
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    pods: tuple[PodWindow, ...] = ()
    decode: StepSums = NO_STEPS
    prefill: StepSums = NO_STEPS

    @property
    def wait_attainment(self) -> float | None:
        """The share of requests scheduled within the objective; None below 20 requests."""
        return self.waited_within / self.requests if self.requests >= MIN_REQUESTS else None

    @property
    def batch_attainment(self) -> float | None:
        """The share of steps within the objective; None below 100 steps."""
        return self.steps_within / self.steps if self.steps >= MIN_STEPS else None


def _difference(now: Iterable[float], before: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(sub, now, before))


def judged_waits(delta: Counters) -> tuple[float, float, float]:
    """Return the requests first scheduled, the sum of their waits (s) and those within, for judged tiers."""
    count = delta.wait_count_realtime + delta.wait_count_standard
    if count > 0:
        return (
            count,
            delta.wait_sum_s_realtime + delta.wait_sum_s_standard,
            delta.wait_within_realtime + delta.wait_within_standard,
        )
    if delta.arrivals_realtime + delta.arrivals_standard > 0:
        return 0.0, 0.0, 0.0
    return delta.wait_count_batch, delta.wait_sum_s_batch, delta.wait_within_batch


def _sums_between(now: StepSums | None, before: StepSums | None) -> StepSums:
    if now is None or before is None:
        return NO_STEPS
    delta = StepSums._make(_difference(now, before))
    return delta if 0.0 <= sum(delta) <= MAX_SUM and min(delta) >= 0.0 else NO_STEPS


def _plus(a: StepSums, b: StepSums) -> StepSums:
    if not b.steps:
        return a
    return StepSums._make(map(add, a, b))


def close_window(tracks: Mapping[str, PodTrack], usable: Iterable[str]) -> Window | None:
    """Return the window from each usable pod's mark to its newest sample; None if no pod has both.

    Counts are summed over pods, so each pod is weighted by what it served.
    """
    total = [0.0] * len(Counters._fields)
    spans: list[tuple[PodSample, PodSample]] = []
    pods: list[PodWindow] = []
    decode = prefill = NO_STEPS
    for name in usable:
        track = tracks[name]
        start, end = track.mark, track.newest
        if start is None or end is None or end.time - start.time < MIN_SPAN_S:
            continue
        delta = _difference(end.counters, start.counters)
        total = list(map(add, total, delta))
        spans.append((start, end))
        counters = Counters._make(delta)
        pods.append(PodWindow(name, counters.batch_time_count, counters.batch_time_within))
        decode = _plus(decode, _sums_between(end.decode, start.decode))
        prefill = _plus(prefill, _sums_between(end.prefill, start.prefill))
    if not spans:
        return None
    delta_all = Counters._make(total)
    requests, _, within = judged_waits(delta_all)
    return Window(
        start=min(start.time for start, _ in spans),
        end=max(end.time for _, end in spans),
        scheduled=delta_all.wait_count_realtime
        + delta_all.wait_count_standard
        + delta_all.wait_count_batch,
        requests=requests,
        waited_within=within,
        steps=delta_all.batch_time_count,
        steps_within=delta_all.batch_time_within,
        seconds=delta_all.batch_time_sum_s,
        prompt_tokens=delta_all.prompt_tokens,
        generation_tokens=delta_all.generation_tokens,
        pods=tuple(pods),
        decode=decode,
        prefill=prefill,
    )
