"""The time without a request of a user, from shared memory. Pure.

Only requests for the engine count, including those that admission refuses. The supervisor's own probes pass
by the middleware's counts, and end before the engine has started.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import MiddlewareBlock, SchedulerBlock


@dataclass(frozen=True, slots=True)
class Activity:
    """The counts of requests, and when they last changed or showed one; times are monotonic seconds."""

    counts: tuple[int, ...] = ()
    at: float = math.inf
    """Infinite while nothing is known of requests."""

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last request arrived, waited or ran; 0 while one does."""
        return max(0.0, now - self.at)


def decide_activity(
    before: Activity,
    scheduler: SchedulerBlock | None,
    middleware: MiddlewareBlock | None,
    now: float,
    *,
    started: bool,
) -> Activity:
    """Return the activity after one more read of shared memory.

    Without the middleware's block requests are unknown, which counts as one. So does the start of the engine:
    the idle time begins when it can serve.
    """
    if not started or middleware is None:
        return Activity()
    load = sum((*middleware.waiting, *middleware.released))
    if scheduler is not None:
        load += sum((*scheduler.running, *scheduler.waiting))
    # A retry is no arrival, and an arrival has no outcome until its body is read.
    counts = (*middleware.arrivals, *middleware.outcomes, load)
    return Activity(counts, now) if load or counts != before.counts else before
