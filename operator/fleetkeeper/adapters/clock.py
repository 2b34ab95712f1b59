"""The one place that reads a clock. Everything else is given the time."""

from __future__ import annotations

import random
import time


class SystemClock:
    """The machine's clocks, and the randomness that spreads retries."""

    def now(self) -> float:
        """Seconds since the epoch: for what people read. It may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some fixed moment: for deadlines. It never jumps, and runs while stopped."""
        return time.monotonic()

    def process_cpu_s(self) -> float:
        """Seconds of processor time that this process has used."""
        return time.process_time()

    def jitter(self, seconds: float) -> float:
        """Between half of `seconds` and all of it, so that many who wait do not return together."""
        return seconds * (0.5 + random.random() / 2)  # noqa: S311 -- spreads load, guards no secret
