"""The source breaker: reports that Prometheus is lost for a service, after a few ticks without samples.

It changes no decision, since those depend on each sample's age and source. It keeps one slow answer
from causing an event on every service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.constants import LOST_TICKS


@dataclass(frozen=True, slots=True)
class SourceBreaker:
    """The state of the source breaker. Open: Prometheus is lost."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    """Time of the last change."""
    lost: int = 0
    """Consecutive ticks without fresh samples from Prometheus."""

    @property
    def is_silent(self) -> bool:
        """Return whether Prometheus returned no fresh samples in this tick."""
        return self.is_open or self.lost > 0

    @property
    def is_open(self) -> bool:
        """Return whether Prometheus counts as lost."""
        return self.state is BreakerState.OPEN


def decide_source_breaker(breaker: SourceBreaker, *, lost: bool, now: float) -> SourceBreaker:
    """Return the breaker after one tick: open from the third lost tick on, closed by the first answer."""
    if not lost:
        if breaker.is_open:
            return SourceBreaker(since=now)
        return replace(breaker, lost=0) if breaker.lost else breaker
    if breaker.is_open:
        return breaker
    if breaker.lost + 1 >= LOST_TICKS:
        return SourceBreaker(BreakerState.OPEN, now, breaker.lost + 1)
    return replace(breaker, lost=breaker.lost + 1)
