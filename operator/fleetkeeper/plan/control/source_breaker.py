"""Whether Prometheus is lost for a service, as people are told: open after some ticks of silence.

It changes no decision (those rest on each sample's age and source); it keeps one slow answer from
becoming an event on every service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper.plan.control.constants import LOST_TICKS
from fleetkeeper.plan.control.values import BreakerState


@dataclass(frozen=True, slots=True)
class SourceBreaker:
    """OPEN: Prometheus is silent. `lost` counts silent ticks in a row, `since` is the last change."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    lost: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether Prometheus gave nothing fresh in this tick."""
        return self.is_open or self.lost > 0

    @property
    def is_open(self) -> bool:
        """Whether Prometheus counts as lost."""
        return self.state is BreakerState.OPEN


def decide_source_breaker(held: SourceBreaker, *, lost: bool, now: float) -> SourceBreaker:
    """The breaker after one tick: open from the third silent tick on, closed by the first answer."""
    if not lost:
        if held.is_open:
            return SourceBreaker(since=now)
        return replace(held, lost=0) if held.lost else held
    if held.is_open:
        return held
    if held.lost + 1 >= LOST_TICKS:
        return SourceBreaker(BreakerState.OPEN, now, held.lost + 1)
    return replace(held, lost=held.lost + 1)
