"""Recent samples of each pod: the last half minute, and whether they are plausible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper.autoscale.constants import (
    AGEING_S,
    BATCH_TIME_BELIEVED_S,
    BATCH_TIME_OUTLIER,
    FRESH_S,
    FUTURE_S,
    MIN_SPAN_S,
    OVERDUE_S,
    OVERDUE_SCRAPES,
    RATE_S,
    REJECTIONS_STALE,
    TICK_S,
    WARM_UP_S,
    WINDOW_S,
)
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import (
    WITHIN,
    PodSample,
    Source,
    is_reset,
    why_impossible,
)
from fleetkeeper.autoscale.types import Grade, PodView


@dataclass(frozen=True, slots=True)
class PodTrack:
    """A pod's accepted samples, oldest first, over at most RATE_S (plus half a tick)."""

    pod: str
    history: tuple[PodSample, ...] = ()
    mark: PodSample | None = None
    """The sample at which the current window began."""
    rejected: int = 0
    """Consecutive impossible samples."""
    out_until: float = 0.0
    """Time from which a pod is used again after its counters were reset."""

    @property
    def newest(self) -> PodSample | None:
        """The last accepted sample."""
        return self.history[-1] if self.history else None

    @property
    def span_s(self) -> float:
        """Seconds between the oldest and the newest sample."""
        return self.history[-1].time - self.history[0].time if self.history else 0.0

    @property
    def edges(self) -> Edges | None:
        """The bucket boundaries at which the samples were counted."""
        return self.history[-1].edges if self.history else None


def accept(track: PodTrack, sample: PodSample, slowest_step_s: float, now: float) -> PodTrack:
    """Return the track with one more sample: accepted, rejected as impossible, or the first after a reset.

    A sample that is not newer than the last (repeated, or the slower of two sources) changes nothing.
    Sums for the step-time model (for each class) and latencies that this sample leaves out are carried
    over. When the
    objectives change, more or fewer of the same requests and steps are within: that is not a reset.
    """
    newest = track.newest
    if newest is not None and sample.time <= newest.time:
        return track
    if sample.time > now + FUTURE_S:
        return replace(track, rejected=track.rejected + 1)
    before = track
    if newest is not None and sample.edges != newest.edges:
        track = _recounted(track, sample)
        newest = track.newest
    if newest is not None and is_reset(sample, newest) and not why_impossible(sample, 0.0, None):
        return PodTrack(track.pod, (sample,), None, out_until=now + WARM_UP_S)
    limit_s = float("inf")
    if slowest_step_s > 0:
        limit_s = max(BATCH_TIME_BELIEVED_S, BATCH_TIME_OUTLIER * slowest_step_s)
    if why_impossible(sample, limit_s, newest):
        return replace(before, rejected=before.rejected + 1)
    if newest is not None and None in (sample.decode, sample.prefill, sample.latencies):
        sample = PodSample(
            sample.pod,
            sample.time,
            sample.counters,
            sample.gauges,
            newest.decode if sample.decode is None else sample.decode,
            newest.prefill if sample.prefill is None else sample.prefill,
            sample.source,
            sample.missing,
            sample.edges,
            newest.latencies if sample.latencies is None else sample.latencies,
        )
    oldest = sample.time - RATE_S - TICK_S / 2
    history = (*(row for row in track.history if row.time >= oldest), sample)
    if sample.source is Source.DIRECT:
        history = _direct_rows(history)
    return PodTrack(track.pod, history, track.mark or sample, out_until=track.out_until)


def _direct_rows(history: tuple[PodSample, ...]) -> tuple[PodSample, ...]:
    """Return only the direct samples once they span a window, else all.

    Two sources may disagree about a pod, and a rate between their samples would be meaningless.
    Example: with a direct read every 5 s, rates use only direct samples from the third read on.
    """
    own = tuple(row for row in history if row.source is Source.DIRECT)
    return own if own[-1].time - own[0].time >= WINDOW_S - 0.5 else history


def _recounted(track: PodTrack, sample: PodSample) -> PodTrack:
    """Return the track with the bucket boundaries of the sample.

    Counts within the new boundaries are unknown for earlier samples, so the window restarts at this one.
    """
    within = {name: getattr(sample.counters, name) for name in WITHIN}
    history = tuple(
        replace(row, counters=row.counters._replace(**within), edges=sample.edges)
        for row in track.history
    )
    return replace(track, history=history, mark=None)


def grade_of(track: PodTrack | None, now: float) -> Grade:
    """Return FRESH up to 15 s, AGEING up to 60 s, else STALE; also STALE after three impossible samples."""
    newest = track.newest if track is not None else None
    if track is None or newest is None or track.rejected >= REJECTIONS_STALE:
        return Grade.STALE
    age_s = now - newest.time
    if age_s <= FRESH_S:
        return Grade.FRESH
    return Grade.AGEING if age_s <= AGEING_S else Grade.STALE


def is_old(track: PodTrack | None, now: float) -> bool:
    """Return whether there are samples and the newest is older than a minute."""
    newest = track.newest if track is not None else None
    return newest is not None and now - newest.time > AGEING_S


def is_overdue(track: PodTrack, now: float) -> bool:
    """Return whether the next scrape is late or the last sample was rejected.

    Example: with a scrape every 5 s, a pod is overdue if its newest sample is older than 9.5 s.
    """
    if track.rejected or len(track.history) < 2:
        return True
    newest, before = track.history[-1].time, track.history[-2].time
    return now - newest > OVERDUE_SCRAPES * (newest - before) + OVERDUE_S


def is_warmed_up(pod: PodView, now: float) -> bool:
    """Return whether a pod is warmed up: ready for at least a minute."""
    if not pod.ready or pod.deleting or pod.ready_since is None:
        return False
    age_s = age_of(pod.ready_since, now)
    return age_s is None or age_s >= WARM_UP_S


def age_of(moment: float, now: float) -> float | None:
    """Return the seconds since a time that another machine recorded; None if it is in the future.

    Then that machine's clock is or was ahead of this one. The age is unknown, and waiting for that time
    could take hours.
    """
    return now - moment if moment <= now + FUTURE_S else None


def has_rates(track: PodTrack, now: float) -> bool:
    """Return whether rates can be computed from the samples."""
    return now >= track.out_until and track.span_s >= MIN_SPAN_S
