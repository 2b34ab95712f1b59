"""Decide restarts of replicas with a fragmented allocator: rarely, one at a time, in a calm fleet.

A restart removes a replica for one cold start, so it has the requirements of a scale-down, and nothing
else may change at the same time. The limit of one per hour is not stored: a new leader's memory counts
as if a replica had just been restarted, because a stored time could be lost after the deletion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from fleetkeeper.api.conditions import DocumentedEnum
from fleetkeeper.autoscale.constants import (
    FRAGMENTED_EVERY_S,
    FRAGMENTED_RATIO,
    FRAGMENTED_S,
    FRESH_S,
)
from fleetkeeper.autoscale.signals.pod_history import PodTrack, grade_of, has_rates, is_warmed_up
from fleetkeeper.autoscale.types import ControlInputs, Decision, Grade, decide, no_change


class RestartReason(DocumentedEnum):
    """The reason why a fragmented replica is or is not restarted. `.text` explains it."""

    FRAGMENTED = "EngineFragmented", "A replica's fragmentation was above 30% for 10 minutes."
    NONE = "NoneFragmented", "No replica's fragmentation was above 30% for 10 minutes."
    ONLY_REPLICA = "OnlyReplica", "A restart of the only replica would be an outage."
    CHANGING = "FleetChanging", "A rollout, a change of replicas or another remedy is in progress."
    BLOCKED = (
        "NoSpareCapacity",
        "The others must be able to carry the load: fresh samples, closed breakers, no waiting requests, enough capacity.",
    )
    RATE_LIMITED = (
        "RestartRateLimited",
        "At most one per hour, and none in the operator's first hour.",
    )


class Reading(NamedTuple):
    """A replica's fragmentation (ratio, 0 to 1) at the time of a usable sample."""

    time: float
    ratio: float


class Run(NamedTuple):
    """A run of readings above the limit, without a gap: the time of the first, and the last one."""

    since: float
    last: Reading


@dataclass(frozen=True, slots=True)
class FragmentationMemory:
    """Runs by pod, and when a replica was last restarted or this memory began."""

    runs: Mapping[str, Run] = field(default_factory=lambda: MappingProxyType({}))
    restarted: float = 0.0


def fragmentation_readings(
    tracks: Mapping[str, PodTrack], inputs: ControlInputs, now: float
) -> Mapping[str, Reading]:
    """Return the newest readings of warmed-up replicas whose sample is fresh, complete and plausible."""
    found = {}
    for pod in inputs.pods if inputs.settings.restart_fragmented else ():
        track = tracks.get(pod.name)
        if track is None or (sample := track.newest) is None or not is_warmed_up(pod, now):
            continue
        usable = not track.rejected and not sample.missing and has_rates(track, now)
        ratio = sample.gauges.memory_fragmentation_ratio
        if usable and grade_of(track, now) is Grade.FRESH and ratio <= 1.0:
            found[pod.name] = Reading(sample.time, ratio)
    return found


def with_readings(
    memory: FragmentationMemory, readings: Mapping[str, Reading]
) -> FragmentationMemory:
    """Return the memory after these readings. A pod without one above the limit has no run."""
    runs = {}
    for pod, last in readings.items():
        if last.ratio > FRAGMENTED_RATIO:
            run = memory.runs.get(pod)
            continues = run is not None and 0 <= last.time - run.last.time <= FRESH_S
            runs[pod] = Run(run.since if run and continues else last.time, last)
    return memory if runs == memory.runs else replace(memory, runs=runs)


def is_settled(inputs: ControlInputs, recommended: int) -> bool:
    """Return whether the recommended pods exist, none is being deleted, and no rollout is in progress."""
    staying = sum(not pod.deleting for pod in inputs.pods)
    counts = {recommended, inputs.replicas, len(inputs.pods), staying}
    return len(counts) == 1 and not inputs.rolling_out


def decide_fragmentation_restart(
    memory: FragmentationMemory, now: float, *, replicas: int, settled: bool, blocked: bool
) -> tuple[Decision[tuple[str, ...]], FragmentationMemory]:
    """Decide which replica, if any, is restarted now; return it and the new memory.

    It is the most fragmented of those above 30% in every sample for 10 minutes; of equals the first by
    name. `blocked`: a scale-down would not be safe.
    """
    due = {
        pod: run for pod, run in memory.runs.items() if run.last.time - run.since >= FRAGMENTED_S
    }
    if not due:
        return no_change((), RestartReason.NONE, RestartReason.NONE.text), memory
    checks = {
        RestartReason.ONLY_REPLICA: replicas < 2,
        RestartReason.CHANGING: not settled,
        RestartReason.BLOCKED: blocked,
        RestartReason.RATE_LIMITED: now - memory.restarted < FRAGMENTED_EVERY_S,
    }
    for reason, applies in checks.items():
        if applies:
            return no_change((), reason, reason.text), memory
    pod = min(due, key=lambda name: (-due[name].last.ratio, name))
    since, last = due[pod]
    detail = (
        f"{last.ratio:.1%} of its allocator's reserved memory is unused, "
        f"more than {FRAGMENTED_RATIO:.0%} for {(last.time - since) / 60:.0f} minutes"
    )
    return decide((pod,), RestartReason.FRAGMENTED, detail), replace(memory, restarted=now)
