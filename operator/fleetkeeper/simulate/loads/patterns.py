"""Patterns of load: arrivals per second as a function of time. The given rate is the highest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
PEAK_AT_S: Final = 14 * HOUR_S
"""A day is busiest at 14:00, twelve hours after its quietest time."""
NIGHT_RATIO: Final = 0.2
BURST_EVERY_S: Final = 600.0
BURST_S: Final = 60.0
BURST_AT_S: Final = 240.0
"""Bursts of a minute start 4 minutes into each 10, so that ten minutes contain a whole one."""
BURST_BASE_RATIO: Final = 1 / 3


class Pattern(StrEnum):
    """The known patterns."""

    CONSTANT = "constant"
    STEP = "step"
    RAMP = "ramp"
    BURST = "burst"
    DAY = "day"

    @property
    def text(self) -> str:
        """Description of the pattern, for display."""
        return _TEXTS[self]

    @property
    def usual_s(self) -> float:
        """The length of a run without a given one."""
        return DAY_S if self is Pattern.DAY else HOUR_S


_TEXTS: Final = {
    Pattern.CONSTANT: "the rate all the time",
    Pattern.STEP: "half of it, the whole in the middle third",
    Pattern.RAMP: "from a tenth up to it in two thirds of the time, then back",
    Pattern.BURST: "a third of it, and the whole for one minute in ten",
    Pattern.DAY: "a fifth of it at 2:00, the whole at 14:00",
}


def rate_of(pattern: Pattern, highest: float, seconds: float) -> Callable[[float], float]:
    """Return the arrivals per second at a time, at most `highest`, in a run of `seconds`."""

    def ratio(now: float) -> float:
        if pattern is Pattern.STEP:
            return 1.0 if seconds / 3 <= now < 2 * seconds / 3 else 0.5
        if pattern is Pattern.RAMP:
            top = 2 * seconds / 3
            share = now / top if now <= top else (seconds - now) / (seconds - top)
            return 0.1 + 0.9 * max(0.0, share)
        if pattern is Pattern.BURST:
            is_burst = BURST_AT_S <= now % BURST_EVERY_S < BURST_AT_S + BURST_S
            return 1.0 if is_burst else BURST_BASE_RATIO
        if pattern is Pattern.DAY:
            wave = 0.5 + 0.5 * math.cos(2 * math.pi * (now - PEAK_AT_S) / DAY_S)
            return NIGHT_RATIO + (1 - NIGHT_RATIO) * wave
        return 1.0

    return lambda now: highest * ratio(now)
