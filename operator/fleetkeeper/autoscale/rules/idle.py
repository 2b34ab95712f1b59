"""Whether a service was without requests for long enough to sleep. Anything unknown is not idle.

The planner decides about sleep (`reconcile/sleep.py`). Here are the measurements that it needs, and when they
require that pods are read directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import EARLY_IDLE_S, IDLE_READ_S
from fleetkeeper.autoscale.signals.pod_history import PodTrack, grade_of
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.autoscale.types import ControlInputs, Grade
from fleetkeeper.common.sleep import NOT_IDLE, Idle
from fleetkeeper_contract.tiers import Tier


@dataclass(frozen=True, slots=True)
class EarlySleep:
    """What is known of an idle service that may sleep before the end of its `afterIdleSeconds`."""

    cost: float
    """See `early_sleep_cost`."""
    tier: Tier = Tier.STANDARD
    """The most urgent tier of the requests that its replicas got."""
    is_read: bool = True
    """True if every pod was read directly."""
    was_awake: bool = True
    """True if it has been awake for its `minAwakeSeconds`."""
    is_asked: bool = False
    """True if the last tick asked it to sleep."""
    nodes: tuple[str, ...] = ()
    """The node of each replica."""

    def yields_to(self, tier: Tier) -> bool:
        """Return whether it sleeps for a request of this tier."""
        return tier < self.tier or (tier == self.tier and self.was_awake)


def early_sleep_cost(start_s: float, idle_s: float) -> float:
    """Return what it costs to let an idle service sleep now: seconds of its next start by second without a request.

    The longer a service had no request, the later its next one is likely to come. With starts of 75 s,
    0.25 after 300 s and 2.5 after 30 s.
    """
    return start_s / max(1.0, idle_s)


def are_read_directly(inputs: ControlInputs, tracks: Iterable[PodTrack], now: float) -> bool:
    """Return whether the newest sample of every ready pod is fresh and was read directly.

    Also of pods that warm up: their rates mean nothing yet, but the time of their last request does. While
    Prometheus is lost, it is False.
    """
    return not inputs.prometheus_lost and all(
        track.newest is not None
        and track.newest.source is Source.DIRECT
        and grade_of(track, now) is Grade.FRESH
        for track in tracks
    )


def decide_idle(
    state: TickState, tracks: Iterable[PodTrack], *, is_direct: bool, sleeps_for: str = ""
) -> Idle:
    """Return whether the service is idle.

    `tracks`: those of all ready pods. `is_direct`: see `are_read_directly`. `sleeps_for`: the service that
    needs its accelerators.
    """
    after_s = _sleep_after_s(state)
    if after_s is None or not is_direct:
        return NOT_IDLE
    if sleeps_for or state.settings.goes_to_sleep:  # no request since it began to go
        after_s = min(after_s, EARLY_IDLE_S)
    samples = _idle_samples(tracks, after_s)
    if not samples:
        return NOT_IDLE
    return Idle(is_idle=True, read_at=min(sample.time for sample in samples), sleeps_for=sleeps_for)


def decide_early_sleep(
    state: TickState, tracks: Iterable[PodTrack], now: float, *, is_direct: bool, is_asked: bool
) -> EarlySleep | None:
    """Return what is known of the service if it may sleep early, else None."""
    settings, pods = state.settings, state.inputs.pods
    after_s = _sleep_after_s(state)
    if after_s is None or settings.awake_since is None or state.inputs.rolling_out:
        return None
    samples = _idle_samples(tracks, min(after_s, EARLY_IDLE_S))
    ready = [pod.ready_since for pod in pods if pod.ready_since is not None and not pod.deleting]
    if not samples or not len(samples) == len(ready) == len(pods) == state.inputs.replicas:
        return None
    awake_since = max(settings.awake_since, min(ready))
    return EarlySleep(
        early_sleep_cost(
            state.estimate.cold_start.seconds, min(sample.gauges.idle_s for sample in samples)
        ),
        _asked_tier(samples),
        is_read=is_direct,
        was_awake=now - awake_since >= settings.min_awake_s,
        is_asked=is_asked,
        nodes=tuple(pod.node for pod in pods),
    )


def _asked_tier(samples: Iterable[PodSample]) -> Tier:
    """Return the most urgent tier of all requests that the engines got; standard if they got none."""
    counters = [sample.counters for sample in samples]
    if any(each.arrivals_realtime for each in counters):
        return Tier.REALTIME
    only_batch = any(each.arrivals_batch for each in counters) and not any(
        each.arrivals_standard for each in counters
    )
    return Tier.BATCH if only_batch else Tier.STANDARD


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
