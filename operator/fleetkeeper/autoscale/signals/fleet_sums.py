"""The values of a service: rates and gauges of its reporting pods, summed, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add, sub
from statistics import median

from fleetkeeper.autoscale.constants import REJECTIONS_STALE
from fleetkeeper.autoscale.signals.pod_history import PodTrack
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, Source
from fleetkeeper.autoscale.signals.service_signals import Signals, TokenUse
from fleetkeeper.autoscale.signals.user_latencies import mean_latencies
from fleetkeeper.autoscale.signals.windows import judged_waits


def with_sums(signals: Signals, tracks: Sequence[PodTrack], tokens: TokenUse) -> Signals:
    """Return the signals with the values of these pods; at least one reports."""
    doubted = [0 < track.rejected < REJECTIONS_STALE for track in tracks]
    rate_rows: list[Sequence[float]] = [_rates_of(track) for track in tracks]
    gauge_rows: list[Sequence[float]] = [track.history[-1].gauges for track in tracks]
    if any(doubted):
        rate_rows = _with_medians(rate_rows, doubted)
        gauge_rows = _with_medians(gauge_rows, doubted)
    rates = Counters._make(_summed(rate_rows))
    gauges = _mean_oldest(Gauges._make(_summed(gauge_rows)), len(tracks))
    per_pod = [Gauges._make(row) for row in gauge_rows]
    kv = [g.kv_resident_tokens / g.kv_capacity_tokens for g in per_pod if g.kv_capacity_tokens > 0]
    peak, peak_pod = max((t.history[-1].gauges.memory_peak_ratio, t.pod) for t in tracks)
    requests, waits_s, _ = judged_waits(rates)
    interactive = requests > 0 and rates.wait_count_realtime + rates.wait_count_standard > 0
    ttft_s, itl_s = mean_latencies(tracks, interactive=_has_interactive(gauges, rates))
    direct = any(track.history[-1].source is Source.DIRECT for track in tracks)
    return replace(
        signals,
        reporting_pods=len(tracks),
        is_direct=all(row.source is Source.DIRECT for track in tracks for row in track.history),
        source=Source.DIRECT if direct else Source.PROMETHEUS,
        rates=rates,
        gauges=gauges,
        queue_wait_s=max(waits_s / requests if requests else 0.0, oldest_wait_s(gauges, rates)),
        batch_time_s=_quotient(rates.batch_time_sum_s, rates.batch_time_count),
        waiting=judged_waiting(gauges, rates, interactive=interactive),
        kv_ratio=sum(kv) / len(kv) if kv else 0.0,
        kv_ratio_max=max(kv, default=0.0),
        prompt_tokens=_quotient(tokens.prompt, tokens.requests),
        generation_tokens=_quotient(tokens.generation, tokens.requests),
        memory_used_ratio=max(t.history[-1].gauges.memory_used_ratio for t in tracks),
        memory_peak_ratio=peak,
        memory_peak_pod=peak_pod,
        memory_own=all(g.memory_own > 0 for g in per_pod),
        ttft_s=ttft_s,
        itl_s=itl_s,
        live_limits=all(g.live_limits > 0 for g in per_pod),
        running_by_pod=tuple((t.pod, g.running) for t, g in zip(tracks, per_pod, strict=True)),
        generation_by_pod=tuple(
            (t.pod, g.limit_generation) for t, g in zip(tracks, per_pod, strict=True)
        ),
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
