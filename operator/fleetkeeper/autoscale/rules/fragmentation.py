"""Decide restarts of replicas with a fragmented allocator: rarely, one at a time, in a calm fleet.

Off unless `memory.restartFragmented` is true. A restart removes a replica for one cold start, so it has
the requirements of a scale-down and more: nothing else may change. A replica's run lasts from one fresh
sample to the next; a missing, stale or impossible sample ends it.

The limit of one restart per hour survives a change of leader although it is not stored: a new memory
counts as if a replica had just been restarted. A time in the status could be lost between the deletion
and the write of the status. This rule needs no write, and it costs one hour of a remedy that is not urgent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fleetkeeper.api.conditions import DocumentedEnum
from fleetkeeper.autoscale.constants import (
    FRAGMENTED_EVERY_S,
    FRAGMENTED_GAP_S,
    FRAGMENTED_RATIO,
    FRAGMENTED_REPLICAS,
    FRAGMENTED_S,
)
from fleetkeeper.autoscale.signals.pod_history import PodTrack, grade_of, has_rates, is_warmed_up
from fleetkeeper.autoscale.types import Decision, Grade, PodView, decide, no_change


class RestartReason(DocumentedEnum):
    """The reason why a fragmented replica is or is not restarted. `.text` explains it."""

    FRAGMENTED = (
        "EngineFragmented",
        "The allocator fragmentation of a replica was above 30% for 10 minutes.",
    )
    OFF = "RestartsOff", "spec.memory.restartFragmented is false."
    NONE = (
        "NoneFragmented",
        "No replica had an allocator fragmentation above 30% for 10 minutes.",
    )
    ONLY_REPLICA = "OnlyReplica", "A restart of the only replica would be an outage."
    PACE = (
        "RestartRateLimited",
        "At most one replica is restarted per hour, and none in the operator's first hour.",
    )
    ROLLING_OUT = "RollingOut", "A rollout is in progress."
    REPLACING = "ReplicasReplaced", "Another remedy replaces replicas."
    CHANGING = "ReplicasChange", "The number of replicas is changing."
    BREAKER = "BreakerNotClosed", "A circuit breaker is not closed."
    NO_SPARE_CAPACITY = (
        "NoSpareCapacity",
        "It is not certain that the fleet can spare a replica now.",
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """A replica's fragmentation (ratio, 0 to 1) at the time of a usable sample."""

    pod: str
    time: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run of samples above the limit, without a gap: times of the first and the last, the last ratio."""

    since: float
    newest: float
    ratio: float


@dataclass(frozen=True, slots=True)
class FragmentationMemory:
    """The memory of the rule.

    `runs`: by pod. `restarted`: when a replica was last restarted, or when this memory began.
    """

    runs: Mapping[str, Run] = field(default_factory=lambda: MappingProxyType({}))
    restarted: float = 0.0


@dataclass(frozen=True, slots=True)
class RestartView:
    """Inputs of the rules.

    `replicas`: the live Deployment's number. `recommended`: this tick's recommendation. `in_effect`: whether
    the Deployment has the last allocation. `replacing`: another remedy acts in this tick.
    `breakers_closed`: all of them, including those that only report. `needed`: why a replica cannot be
    removed now, else empty.
    """

    enabled: bool
    replicas: int
    recommended: int
    pods: tuple[PodView, ...]
    in_effect: bool = True
    rolling_out: bool = False
    replacing: bool = False
    breakers_closed: bool = True
    needed: str = ""


def fragmentation_readings(
    tracks: Mapping[str, PodTrack], pods: Sequence[PodView], now: float
) -> tuple[Reading, ...]:
    """Return the newest readings of warmed-up replicas with a fresh, plausible sample.

    A replica with an impossible ratio, above one, is left out.
    """
    return tuple(_readings(tracks, pods, now))


def _readings(
    tracks: Mapping[str, PodTrack], pods: Sequence[PodView], now: float
) -> Iterator[Reading]:
    for pod in pods:
        track = tracks.get(pod.name)
        if track is None or track.newest is None or not is_warmed_up(pod, now):
            continue
        sample = track.newest
        believed = not track.rejected and not sample.missing and has_rates(track, now)
        ratio = sample.gauges.memory_fragmentation_ratio
        if believed and grade_of(track, now) is Grade.FRESH and ratio <= 1.0:
            yield Reading(pod.name, sample.time, ratio)


def watched(
    memory: FragmentationMemory, readings: Sequence[Reading], *, enabled: bool
) -> FragmentationMemory:
    """Return the memory with these readings, which continue, start or end runs; without runs if disabled.

    Example: samples every 5 s above 30%, then none for 16 s, then above 30%: the run restarts at 0 s.
    """
    runs = {}
    for reading in readings if enabled else ():
        if reading.ratio <= FRAGMENTED_RATIO:
            continue
        held = memory.runs.get(reading.pod)
        goes_on = held is not None and 0 <= reading.time - held.newest <= FRAGMENTED_GAP_S
        since = held.since if held is not None and goes_on else reading.time
        runs[reading.pod] = Run(since, reading.time, reading.ratio)
    return memory if runs == memory.runs else replace(memory, runs=runs)


def _only_replica(view: RestartView) -> tuple[RestartReason, str] | None:
    if view.replicas >= FRAGMENTED_REPLICAS:
        return None
    return RestartReason.ONLY_REPLICA, "a restart of the only replica would be an outage"


def _rolling_out(view: RestartView) -> tuple[RestartReason, str] | None:
    return (RestartReason.ROLLING_OUT, "a rollout is in progress") if view.rolling_out else None


def _replacing(view: RestartView) -> tuple[RestartReason, str] | None:
    return (RestartReason.REPLACING, "another remedy acts") if view.replacing else None


def _changing(view: RestartView) -> tuple[RestartReason, str] | None:
    if view.recommended != view.replicas or not view.in_effect:
        return (
            RestartReason.CHANGING,
            f"{view.recommended} replicas are recommended, the Deployment has {view.replicas}",
        )
    stay = [pod for pod in view.pods if not pod.deleting]
    if len(stay) != len(view.pods) or len(stay) != view.replicas:
        return RestartReason.CHANGING, f"{len(view.pods)} pods exist for {view.replicas} replicas"
    return None


def _breaker(view: RestartView) -> tuple[RestartReason, str] | None:
    return (
        None if view.breakers_closed else (RestartReason.BREAKER, "a circuit breaker is not closed")
    )


def _needed(view: RestartView) -> tuple[RestartReason, str] | None:
    return (RestartReason.NO_SPARE_CAPACITY, view.needed) if view.needed else None


OBJECTIONS: tuple[Callable[[RestartView], tuple[RestartReason, str] | None], ...] = (
    _only_replica,
    _rolling_out,
    _replacing,
    _changing,
    _breaker,
    _needed,
)
"""Checks that block a restart, in order; each returns its reason or None."""


def decide_fragmentation_restart(
    view: RestartView, memory: FragmentationMemory, now: float
) -> tuple[Decision[tuple[str, ...]], FragmentationMemory]:
    """Decide which replica, if any, is restarted now; return it and the new memory.

    It is the most fragmented of those above 30% in every sample for 10 minutes; of equals the first by name.
    """
    if not view.enabled:
        return no_change((), RestartReason.OFF, "spec.memory.restartFragmented is false"), memory
    due = [(pod, run) for pod, run in memory.runs.items() if run.newest - run.since >= FRAGMENTED_S]
    if not due:
        return no_change((), RestartReason.NONE, "no replica was above 30% for 10 minutes"), memory
    objection = next((found for check in OBJECTIONS if (found := check(view))), None)
    if objection is not None:
        return no_change((), *objection), memory
    if now - memory.restarted < FRAGMENTED_EVERY_S:
        return no_change((), RestartReason.PACE, "at most one restart per hour"), memory
    pod, worst = min(due, key=lambda item: (-item[1].ratio, item[0]))
    detail = (
        f"{worst.ratio:.1%} of its allocator's reserved memory is unused, "
        f"more than {FRAGMENTED_RATIO:.0%} for {(worst.newest - worst.since) / 60:.0f} minutes"
    )
    chosen: tuple[str, ...] = (pod,)
    decision = decide(chosen, RestartReason.FRAGMENTED, detail)
    return decision, replace(memory, restarted=now)
