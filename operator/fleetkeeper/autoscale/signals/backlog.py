"""The backlog of the batch process: tokens of a service that may wait, and the rate that is in time.

It is advisory. One that is missing, old or impossible changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import AGEING_S, FUTURE_S, MAX_COUNTER, MAX_DEADLINE


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of a service that the batch process exported at `time` (seconds)."""

    tokens: float
    """Prompt and answer tokens of all lines without a result."""
    deadline: float
    """The earliest deadline, in seconds."""
    tokens_per_s: float
    """The minimum rate that meets every deadline; infinite once a deadline has passed."""
    time: float

    @property
    def is_possible(self) -> bool:
        """Return whether every value is possible; no comparison with NaN holds."""
        return (
            0.0 <= self.tokens <= MAX_COUNTER
            and 0.0 < self.deadline <= MAX_DEADLINE
            and self.tokens_per_s >= 0.0
            and math.isfinite(self.time)
        )


def known_backlog(reading: Backlog | None, before: Backlog | None, now: float) -> Backlog | None:
    """Return the newest possible backlog; None if it is older than a minute, or ahead of the clock.

    `before`: the one of the last tick. It outlives its series, because the rates of the engines are
    means of 30 s, and contain the requests of a backlog that has just ended.
    """
    known = [
        each
        for each in (reading, before)
        if each is not None and each.is_possible and -FUTURE_S <= now - each.time <= AGEING_S
    ]
    return max(known, key=lambda each: each.time, default=None)
