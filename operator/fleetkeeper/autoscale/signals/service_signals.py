"""Signals of a service from the samples of its pods, with a grade of their reliability.

A small immutable memory per service (`SignalsMemory`) holds recent samples, and rates are computed from
successive samples. No value is trusted before it is checked (`samples.why_impossible`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from statistics import median
from types import MappingProxyType
from typing import Final

from fleetkeeper.autoscale.constants import (
    COVERAGE_RATIO,
    REFERENCE_DECAY,
    REJECTIONS_STALE,
    TOKENS_EWMA_S,
    WINDOW_S,
    WINDOWS_KEPT,
)
from fleetkeeper.autoscale.signals.hangs import HangRun, hang_runs
from fleetkeeper.autoscale.signals.pod_history import (
    PodTrack,
    accept,
    grade_of,
    has_rates,
    is_old,
    is_overdue,
    is_warmed_up,
)
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    PodSample,
    Source,
)
from fleetkeeper.autoscale.signals.windows import Window, close_window, judged_waits
from fleetkeeper.autoscale.types import Grade, PodView

NO_COUNTERS: Final = Counters()
NO_GAUGES: Final = Gauges()


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Exponentially weighted sums; their quotients are tokens per request."""

    requests: float = 0.0
    prompt: float = 0.0
    generation: float = 0.0


@dataclass(frozen=True, slots=True)
class SignalsMemory:
    """State that the next tick needs: samples by pod, last windows, slowest step, token use, hung pods."""

    tracks: Mapping[str, PodTrack] = field(default_factory=lambda: MappingProxyType({}))
    windows: tuple[Window, ...] = ()
    window_start: float = 0.0
    slowest_step_s: float = 0.0
    tokens: TokenUse = TokenUse()
    hangs: Mapping[str, HangRun] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Signals:
    """The measurements of a service. Sums over the reporting pods unless noted otherwise.

    - `rates`: per second over 30 s, summed over pods. `gauges`: current values, summed, except the oldest
      waits (mean over pods).
    - `coverage`: reporting / ready pods. `reporting_pods`: pods with rates. `overdue_pods`: reporting pods
      whose next scrape is late. `warmed_up_pods`: warmed-up pods. `old_pods`: warmed-up pods whose newest
      sample is too old to be used.
    - `hung_pods` report a hung engine, `long_hung_pods` have reported it for HANG_S; neither need be ready.
    - `window`: the window that closed in this tick, if any. `rejudged`: the objectives changed, and
      attainment is counted from zero.
    - `is_direct`: every sample behind the rates was read directly from its pod.
    """

    grade: Grade = Grade.STALE
    coverage: float = 0.0
    ready_pods: int = 0
    reporting_pods: int = 0
    source: Source = Source.PROMETHEUS
    rates: Counters = NO_COUNTERS
    gauges: Gauges = NO_GAUGES
    queue_wait_s: float = 0.0
    batch_time_s: float = 0.0
    waiting: float = 0.0
    burstiness: float = 1.0
    kv_ratio: float = 0.0
    kv_ratio_max: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    memory_used_ratio: float = 0.0
    memory_peak_ratio: float = 0.0
    memory_peak_pod: str = ""
    limit_sequences: float = 0.0
    live_limits: bool = True
    hung_pods: tuple[str, ...] = ()
    long_hung_pods: tuple[str, ...] = ()
    running_by_pod: tuple[tuple[str, float], ...] = ()
    generation_by_pod: tuple[tuple[str, float], ...] = ()
    rejections: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    windows: tuple[Window, ...] = ()
    window: Window | None = None
    overdue_pods: int = 0
    warmed_up_pods: int = 0
    old_pods: int = 0
    rejudged: bool = False
    is_direct: bool = False

    @property
    def known(self) -> bool:
        """Return whether any decision may use these signals."""
        return self.grade is not Grade.STALE

    @property
    def arrivals_per_s(self) -> float:
        """Distinct requests that arrive per second, all tiers, including those that are refused."""
        rates = self.rates
        return rates.arrivals_realtime + rates.arrivals_standard + rates.arrivals_batch

    @property
    def served_per_s(self) -> float:
        """Requests that are first scheduled per second, all tiers."""
        rates = self.rates
        return rates.wait_count_realtime + rates.wait_count_standard + rates.wait_count_batch

    @property
    def preemptions_per_pod_s(self) -> float:
        """Preemptions per second and pod."""
        return self.rates.preemptions / self.reporting_pods if self.reporting_pods else 0.0

    @property
    def idle(self) -> bool:
        """Return whether every ready pod reports no arrivals for 30 s, no waiting and no running requests."""
        return (
            self.known
            and self.coverage >= 1.0
            and self.arrivals_per_s == 0.0
            and self.gauges.running == 0.0
            and self.waiting == 0.0
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Facts about the pods before their values are summed."""

    memory: SignalsMemory
    grade: Grade
    coverage: float
    ready_pods: int
    hung: tuple[str, ...]
    long_hung: tuple[str, ...]
    rejections: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    window: Window | None
    overdue: int
    warmed_up: int
    old: int
    rejudged: bool


def observe_service(
    samples: Sequence[PodSample], pods: Sequence[PodView], memory: SignalsMemory, now: float
) -> tuple[Signals, SignalsMemory]:
    """Return the signals of a service and the new memory.

    Samples of pods that do not exist, are not ready or are being deleted are not used. Those of pods that
    are warming up are only remembered. If fewer than half of the warmed-up pods report, the grade is
    STALE.
    """
    tracks = _updated_tracks(samples, pods, memory, now)
    rejudged = _is_rejudged(tracks, memory)
    if rejudged:
        memory = replace(memory, windows=())
    ready = [pod.name for pod in pods if pod.ready and not pod.deleting]
    warmed_up = [pod.name for pod in pods if is_warmed_up(pod, now)]
    graded = {name: grade_of(tracks.get(name), now) for name in warmed_up}
    usable = [
        name
        for name in warmed_up
        if graded[name] is not Grade.STALE
        and has_rates(tracks[name], now)
        and not _newest(tracks[name]).missing
    ]
    hangs = hang_runs(samples, pods, memory.hangs, now)
    # A hung pod counts as reporting, but its values are not part of the signals.
    fresh = sum(1 for name in usable if name in hangs or graded[name] is Grade.FRESH)
    grade = _service_grade(len(usable), fresh, len(warmed_up))
    usable = [name for name in usable if name not in hangs]
    memory, window = _windows(replace(memory, hangs=hangs), tracks, usable, now)
    seen = _Seen(
        memory,
        grade,
        len(usable) / len(ready) if ready else 0.0,
        len(ready),
        tuple(sorted(hangs)),
        tuple(sorted([name for name, run in hangs.items() if run.is_long])),
        tuple([(n, tracks[n].rejection) for n in warmed_up if n in tracks and tracks[n].rejected]),
        _missing(tracks, warmed_up),
        window,
        sum([is_overdue(tracks[name], now) for name in usable]),
        len(warmed_up),
        sum([is_old(tracks.get(name), now) for name in warmed_up]),
        rejudged,
    )
    return _signals(seen, usable), memory


def _is_rejudged(tracks: Mapping[str, PodTrack], memory: SignalsMemory) -> bool:
    """Return whether a pod's samples use other bucket boundaries than before: the objectives changed."""
    return any(
        track is not held and held.history and track.edges != held.edges
        for name, track in tracks.items()
        if (held := memory.tracks.get(name)) is not None
    )


def _newest(track: PodTrack) -> PodSample:
    return track.history[-1]


def _missing(tracks: Mapping[str, PodTrack], warmed_up: Sequence[str]) -> tuple[str, ...]:
    named = {
        name
        for pod in warmed_up
        if pod in tracks and tracks[pod].history
        for name in _newest(tracks[pod]).missing
    }
    return tuple(sorted(named)) if named else ()


def _updated_tracks(
    samples: Sequence[PodSample], pods: Sequence[PodView], memory: SignalsMemory, now: float
) -> dict[str, PodTrack]:
    tracks = {
        pod.name: memory.tracks.get(pod.name) or PodTrack(pod.name)
        for pod in pods
        if pod.ready and not pod.deleting
    }
    for sample in samples:
        track = tracks.get(sample.pod)
        if track is not None:
            tracks[sample.pod] = accept(track, sample, memory.slowest_step_s, now)
    return tracks


def _service_grade(reporting: int, fresh: int, warmed_up: int) -> Grade:
    if not warmed_up or not reporting or reporting < COVERAGE_RATIO * warmed_up:
        return Grade.STALE
    return Grade.FRESH if fresh >= COVERAGE_RATIO * warmed_up else Grade.AGEING


def _windows(
    memory: SignalsMemory, tracks: dict[str, PodTrack], usable: Sequence[str], now: float
) -> tuple[SignalsMemory, Window | None]:
    """Close the window when its time is over, and mark the start of the next."""
    windows, slowest, tokens = memory.windows, memory.slowest_step_s, memory.tokens
    if now - memory.window_start < WINDOW_S - 0.5:
        return replace(memory, tracks=tracks), None
    window = close_window(tracks, usable)
    marked = {
        name: PodTrack(name, t.history, t.newest, t.rejected, t.rejection, t.out_until)
        for name, t in tracks.items()
    }
    if window is None:
        return replace(memory, tracks=marked, window_start=now), None
    slowest *= REFERENCE_DECAY
    if window.steps > 0:
        slowest = max(slowest, window.seconds / window.steps)
    windows = (*windows, window)[-WINDOWS_KEPT:]
    tokens = _token_use(tokens, window)
    return SignalsMemory(marked, windows, now, slowest, tokens, memory.hangs), window


def _token_use(held: TokenUse, window: Window) -> TokenUse:
    keep = max(0.0, 1.0 - (window.end - window.start) / TOKENS_EWMA_S)
    return TokenUse(
        requests=held.requests * keep + window.scheduled,
        prompt=held.prompt * keep + window.prompt_tokens,
        generation=held.generation * keep + window.generation_tokens,
    )


def _rates_of(track: PodTrack) -> list[float]:
    first, last = track.history[0], track.history[-1]
    span_s = last.time - first.time
    return [gained / span_s for gained in map(sub, last.counters, first.counters)]


def _summed(rows: Sequence[Sequence[float]]) -> list[float]:
    total: Sequence[float] = rows[0]
    for row in rows[1:]:
        total = list(map(add, total, row))
    return list(total)


def _with_medians(rows: list[Sequence[float]], doubted: Sequence[bool]) -> list[Sequence[float]]:
    """Replace the rows of pods whose last sample was rejected by the medians of the other pods."""
    peers = [row for row, doubt in zip(rows, doubted, strict=True) if not doubt]
    if not peers or len(peers) == len(rows):
        return rows
    middle = [median(column) for column in zip(*peers, strict=True)]
    return [middle if doubt else row for row, doubt in zip(rows, doubted, strict=True)]


def _signals(seen: _Seen, usable: Sequence[str]) -> Signals:
    memory = seen.memory
    if not usable:
        return Signals(
            grade=seen.grade,
            ready_pods=seen.ready_pods,
            hung_pods=seen.hung,
            long_hung_pods=seen.long_hung,
            rejections=seen.rejections,
            missing=seen.missing,
            windows=memory.windows,
            warmed_up_pods=seen.warmed_up,
            old_pods=seen.old,
            rejudged=seen.rejudged,
        )
    tracks = [memory.tracks[name] for name in usable]
    doubted = [0 < track.rejected < REJECTIONS_STALE for track in tracks]
    rate_rows: list[Sequence[float]] = [_rates_of(track) for track in tracks]
    gauge_rows: list[Sequence[float]] = [_newest(track).gauges for track in tracks]
    if any(doubted):
        rate_rows = _with_medians(rate_rows, doubted)
        gauge_rows = _with_medians(gauge_rows, doubted)
    rates = Counters._make(_summed(rate_rows))
    gauges = _mean_oldest(Gauges._make(_summed(gauge_rows)), len(usable))
    per_pod = [Gauges._make(row) for row in gauge_rows]
    kv = [g.kv_resident_tokens / g.kv_capacity_tokens for g in per_pod if g.kv_capacity_tokens > 0]
    peak, peak_pod = max((_newest(t).gauges.memory_peak_ratio, t.pod) for t in tracks)
    requests, waits_s, _ = judged_waits(rates)
    interactive = requests > 0 and rates.wait_count_realtime + rates.wait_count_standard > 0
    tokens = memory.tokens
    direct = any(_newest(track).source is Source.DIRECT for track in tracks)
    return Signals(
        grade=seen.grade,
        coverage=seen.coverage,
        ready_pods=seen.ready_pods,
        reporting_pods=len(usable),
        hung_pods=seen.hung,
        long_hung_pods=seen.long_hung,
        rejections=seen.rejections,
        missing=seen.missing,
        window=seen.window,
        overdue_pods=seen.overdue,
        warmed_up_pods=seen.warmed_up,
        old_pods=seen.old,
        rejudged=seen.rejudged,
        is_direct=all(row.source is Source.DIRECT for track in tracks for row in track.history),
        source=Source.DIRECT if direct else Source.PROMETHEUS,
        rates=rates,
        gauges=gauges,
        queue_wait_s=max(waits_s / requests if requests else 0.0, oldest_wait_s(gauges, rates)),
        batch_time_s=_quotient(rates.batch_time_sum_s, rates.batch_time_count),
        waiting=judged_waiting(gauges, rates, interactive=interactive),
        burstiness=_dispersion(rate_rows),
        kv_ratio=sum(kv) / len(kv) if kv else 0.0,
        kv_ratio_max=max(kv, default=0.0),
        prompt_tokens=_quotient(tokens.prompt, tokens.requests),
        generation_tokens=_quotient(tokens.generation, tokens.requests),
        memory_used_ratio=max(_newest(t).gauges.memory_used_ratio for t in tracks),
        memory_peak_ratio=peak,
        memory_peak_pod=peak_pod,
        limit_sequences=min(g.limit_sequences for g in per_pod),
        live_limits=all(g.live_limits > 0 for g in per_pod),
        running_by_pod=tuple((t.pod, g.running) for t, g in zip(tracks, per_pod, strict=True)),
        generation_by_pod=tuple(
            (t.pod, g.limit_generation) for t, g in zip(tracks, per_pod, strict=True)
        ),
        windows=memory.windows,
    )


def _quotient(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _mean_oldest(gauges: Gauges, pods: int) -> Gauges:
    """Return the gauges with mean oldest waits: the router handles a slow pod, this loop a slow fleet."""
    return gauges._replace(
        oldest_wait_s_realtime=gauges.oldest_wait_s_realtime / pods,
        oldest_wait_s_standard=gauges.oldest_wait_s_standard / pods,
        oldest_wait_s_batch=gauges.oldest_wait_s_batch / pods,
    )


def _has_interactive(gauges: Gauges, rates: Counters) -> bool:
    return (
        rates.arrivals_realtime + rates.arrivals_standard > 0
        or gauges.waiting_realtime + gauges.waiting_standard > 0
    )


def oldest_wait_s(gauges: Gauges, rates: Counters) -> float:
    """Return the oldest wait of the judged tiers: realtime and standard, or batch if it is alone."""
    if _has_interactive(gauges, rates):
        return max(gauges.oldest_wait_s_realtime, gauges.oldest_wait_s_standard)
    return gauges.oldest_wait_s_batch


def judged_waiting(gauges: Gauges, rates: Counters, *, interactive: bool) -> float:
    """Return the waiting requests of the judged tiers."""
    if interactive or _has_interactive(gauges, rates):
        return gauges.waiting_realtime + gauges.waiting_standard
    return gauges.waiting_batch


def _dispersion(rows: Sequence[Sequence[float]]) -> float:
    """Return the index of dispersion of arrivals in 1 s bins: variance over mean, 1 for Poisson.

    Each row holds a pod's rates, so `arrivals_squared` is the mean of the squared bins, summed over
    tiers. Tiers and pods are assumed to be independent, so that variances add.
    """
    index_squared = Counters._fields.index("arrivals_squared")
    first = Counters._fields.index("arrivals_realtime")
    variance = mean = 0.0
    for row in rows:
        tiers = row[first : first + 3]
        variance += max(0.0, row[index_squared] - sum([rate * rate for rate in tiers]))
        mean += sum(tiers)
    return variance / mean if mean > 0 else 1.0
