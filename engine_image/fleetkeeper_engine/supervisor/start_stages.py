"""Stages of a start, and how long each has taken. Pure.

Each stage ends with a signal that needs no log line: the return of `load_model` in every worker (from
shared memory), the first answer of vLLM's API server, and the first token. Without the first signal,
`weights` lasts until the API server answers, and there is no `load`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StartStage(StrEnum):
    """A stage of a start inside the engine's container, in this order."""

    WEIGHTS = "weights"
    LOAD = "load"
    WARM_UP = "warm_up"


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The signals of a start in monotonic seconds; None for those that are still to come."""

    began: float
    loaded: float | None = None
    answered: float | None = None
    ready: float | None = None


def stage_seconds(times: StartTimes, now: float) -> dict[StartStage, float]:
    """Return the seconds of each stage that has begun. The last one lasts until the pod is ready."""
    found = {}
    weights_end = times.answered if times.loaded is None else times.loaded
    found[StartStage.WEIGHTS] = _between(times.began, weights_end, now)
    if times.loaded is not None:
        found[StartStage.LOAD] = _between(times.loaded, times.answered, now)
    if times.answered is not None:
        found[StartStage.WARM_UP] = _between(times.answered, times.ready, now)
    return found


def _between(begin: float, end: float | None, now: float) -> float:
    return max(0.0, (now if end is None else end) - begin)
