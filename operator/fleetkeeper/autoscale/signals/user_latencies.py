"""TTFT and ITL of a service: what users saw in the last half minute. Shown, and never part of a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, sub

from fleetkeeper.autoscale.constants import MAX_SUM
from fleetkeeper.autoscale.signals.pod_history import PodTrack
from fleetkeeper.autoscale.signals.samples import Latencies

NONE = Latencies()


def mean_latencies(
    tracks: Iterable[PodTrack], *, interactive: bool
) -> tuple[float | None, float | None]:
    """Return mean TTFT and mean ITL in seconds of the judged tiers; None for one that was not measured.

    `interactive`: realtime or standard requests arrive, so batch does not stand for them.
    """
    total = NONE
    for track in tracks:
        total = Latencies._make(map(add, total, _gained(track)))
    return (
        _judged_mean(total[0:3], total[3:6], interactive=interactive),
        _judged_mean(total[6:9], total[9:12], interactive=interactive),
    )


def _gained(track: PodTrack) -> Latencies:
    """Return the increase over a pod's samples; zeros if it is unknown or impossible."""
    known = [row.latencies for row in track.history if row.latencies is not None]
    if len(known) < 2:
        return NONE
    gained = Latencies._make(map(sub, known[-1], known[0]))
    return gained if 0.0 <= sum(gained) <= MAX_SUM and min(gained) >= 0.0 else NONE


def _judged_mean(
    counts: Sequence[float], sums_s: Sequence[float], *, interactive: bool
) -> float | None:
    """Return the mean of realtime and standard together, or of batch alone."""
    realtime, standard, batch = counts
    if realtime + standard > 0:
        return (sums_s[0] + sums_s[1]) / (realtime + standard)
    return sums_s[2] / batch if batch > 0 and not interactive else None
