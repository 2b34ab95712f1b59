"""Whether a service was without requests for long enough to sleep. Anything unknown is not idle.

The planner decides about sleep (`reconcile/sleep.py`). Here are the measurements that it needs, and when they
require that pods are read directly.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetkeeper.autoscale.constants import IDLE_READ_S
from fleetkeeper.autoscale.signals.pod_history import PodTrack
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.common.sleep import NOT_IDLE, Idle


def decide_idle(state: TickState, tracks: Iterable[PodTrack], *, is_direct: bool) -> Idle:
    """Return whether the service is idle.

    `tracks`: those of all ready pods. `is_direct`: they have fresh samples that were read directly.
    """
    after_s = _sleep_after_s(state)
    if after_s is None or not is_direct:
        return NOT_IDLE
    samples = _idle_samples(tracks, after_s)
    if not samples or any(sample.source is not Source.DIRECT for sample in samples):
        return NOT_IDLE
    return Idle(is_idle=True, read_at=min(sample.time for sample in samples))


def is_sleep_near(state: TickState, tracks: Iterable[PodTrack]) -> bool:
    """Return whether pods must be read directly: the service goes to sleep, or could do so in a few ticks."""
    if state.settings.goes_to_sleep:
        return True
    after_s = _sleep_after_s(state)
    return after_s is not None and bool(_idle_samples(tracks, after_s - IDLE_READ_S))


def _sleep_after_s(state: TickState) -> float | None:
    """Return the idle time after which the service may sleep; None if it may not."""
    has_backlog = state.backlog is not None and state.backlog.tokens > 0
    may_sleep = state.settings.tunes_replicas and not has_backlog
    return state.settings.sleep_after_s if may_sleep else None


def _idle_samples(tracks: Iterable[PodTrack], after_s: float) -> list[PodSample]:
    """Return the newest samples of all pods if each had no request for that time, else none."""
    samples: list[PodSample] = []
    for track in tracks:
        newest = track.newest
        if newest is None or newest.gauges.idle_s < after_s or newest.gauges.has_requests:
            return []
        samples.append(newest)
    return samples
