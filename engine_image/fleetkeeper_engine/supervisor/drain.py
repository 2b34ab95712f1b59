"""Phases of a pod's drain, with one clock for preStop and SIGTERM. Pure.

- notice: not ready any more, still serving, because routers need time to react.
- closing: nothing is admitted (503), and running requests continue.
- stopping: nothing runs, or the deadline passed, and vLLM gets SIGTERM.
- killing: vLLM did not exit by itself, and its session gets SIGKILL.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

STOP_PATIENCE_S = 10.0
"""Time for vLLM to exit after SIGTERM. It exits in 1-3 s when nothing runs."""
ABORT_S = 0.5
"""Time for the middleware to end responses cleanly before vLLM is stopped."""
SETTLE_S = 0.5
"""Time after closing before "nothing runs" is trusted: a request may be on its way in."""
NOTICE_SHARE = 0.25
"""Maximum share of a short deadline for the notice."""


class DrainPhase(StrEnum):
    """The phase of a drain."""

    NOTICE = "notice"
    CLOSING = "closing"
    STOPPING = "stopping"
    KILLING = "killing"


@dataclass(frozen=True, slots=True)
class DrainClock:
    """The start of a drain and its maximum duration; monotonic seconds."""

    began: float
    seconds: float
    notice_s: float

    @property
    def notice_ends(self) -> float:
        """Return when admission closes: after the notice, or a quarter of a short deadline."""
        return self.began + min(self.notice_s, self.seconds * NOTICE_SHARE)

    @property
    def deadline(self) -> float:
        """Return when vLLM is stopped, with or without running requests."""
        return self.began + self.seconds

    @property
    def abort_deadline(self) -> float:
        """Return when the middleware ends running responses at a whole frame: just before the deadline."""
        return max(self.notice_ends, self.deadline - ABORT_S)


def decide_drain(
    clock: DrainClock, *, unfinished: int, stop_sent: float | None, now: float
) -> DrainPhase:
    """Return the phase now. `unfinished` counts requests in the engine and in the queue in front of it."""
    if stop_sent is not None:
        late = now - stop_sent >= STOP_PATIENCE_S
        return DrainPhase.KILLING if late else DrainPhase.STOPPING
    if now >= clock.deadline:
        return DrainPhase.STOPPING
    if now < clock.notice_ends:
        return DrainPhase.NOTICE
    settled = now >= clock.notice_ends + SETTLE_S
    return DrainPhase.STOPPING if settled and not unfinished else DrainPhase.CLOSING
