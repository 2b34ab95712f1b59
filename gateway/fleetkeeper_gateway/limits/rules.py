"""Waits, remainders and headers that clients get about their limits. Pure.

Requests are counted by the sliding window counter of the library `limits`: those of the previous window
count in proportion to the part of it that is still within the last minute. Tokens are a bucket that
fills at the limit's rate and may be negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fleetkeeper_contract.bodies.asked import BYTES_PER_TOKEN
from fleetkeeper_gateway.interfaces import Demand, LimitRefused, TierLimits

MINUTE_MS = 60_000.0
MAX_RETRY_S = 60
EPSILON = 1e-6
"""Maximum rounding error, in tokens or ms, of sums of fractions against whole numbers."""
CLOSED_S = 1.0
"""Time for which a refusal by the limit of requests is repeated without a call to Redis."""
CONCURRENCY_RETRY_S = 1
"""Seconds of Retry-After at the concurrency limit. The end of a running request is unknown."""


@dataclass(frozen=True, slots=True)
class Window:
    """Counted requests. A window counts for twice its length: first as the current, then as the previous window."""

    before: int = 0
    before_ms: float = 0.0
    """Time until the previous window stops counting."""
    current: int = 0
    current_ms: float = 0.0
    """Time until the current window stops counting, as the previous one."""

    def used(self, window_ms: float) -> int:
        """Return the number of requests that count now."""
        return math.floor(self.before * self.before_ms / window_ms) + self.current

    def wait_ms(self, limit: float, window_ms: float) -> float:
        """Return the time until another request is admitted, if none is counted before."""
        if limit <= 0:
            return math.inf
        if self.used(window_ms) < limit:
            return 0.0
        if self.current < limit:
            # Until floor(before * rest / window) <= limit - 1 - current.
            rest_ms = (limit - self.current) * window_ms / self.before
            return self.before_ms - rest_ms + 1
        # Until this window has become the previous one, and a part of it is older than a minute.
        shift_ms = max(0.0, self.current_ms - window_ms)
        return shift_ms + max(0.0, window_ms - limit * window_ms / self.current) + 1

    def reset_ms(self) -> float:
        """Return the time until no request counts, if none is counted before."""
        return self.current_ms if self.current else self.before_ms if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The outcome of an admission, and the state of the limits afterwards."""

    admitted: bool
    running: int
    level: float
    """Tokens in the bucket."""
    window: Window


@dataclass(frozen=True, slots=True)
class Closed:
    """The last refusal of a key in a tier. For `CLOSED_S`, further requests are refused without a call to Redis."""

    at: float
    """Time of the refusal, in the event loop's time."""
    reading: Reading

    def reading_at(self, now: float) -> Reading | None:
        """Return the reading at this time; None if it is too old, because a limit may have been raised."""
        if now - self.at > CLOSED_S:
            return None
        window, passed_ms = self.reading.window, (now - self.at) * 1000
        shifted = replace(
            window,
            before_ms=max(0.0, window.before_ms - passed_ms),
            current_ms=max(0.0, window.current_ms - passed_ms),
        )
        return replace(self.reading, window=shifted)


def estimate_tokens(prompt_bytes: int, max_tokens: int | None, answers: int, cap: int) -> int:
    """Return the estimated tokens of a request: bytes / 4 + min(max_tokens, cap) * answers."""
    answer = cap if max_tokens is None else min(max(0, max_tokens), cap)
    return math.ceil(prompt_bytes / BYTES_PER_TOKEN) + answer * max(1, answers)


def duration(milliseconds: float) -> str:
    """Format a duration as OpenAI's headers do: 0s, 17ms, 8.64s, 6m0s, 1h0m0s."""
    whole = max(0, math.ceil(min(milliseconds, 1e12) - EPSILON))
    if 0 < whole < 1000:
        return f"{whole}ms"
    minutes, rest = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def headers_of(limits: TierLimits, reading: Reading, window_ms: float) -> dict[str, str]:
    """Return the x-ratelimit-* headers of the limits that are set."""
    headers = {}
    if (most := limits.requests_per_minute) is not None:
        headers["x-ratelimit-limit-requests"] = str(most)
        left = max(0, most - reading.window.used(window_ms))
        headers["x-ratelimit-remaining-requests"] = str(left)
        headers["x-ratelimit-reset-requests"] = duration(reading.window.reset_ms())
    if (most := limits.tokens_per_minute) is not None:
        headers["x-ratelimit-limit-tokens"] = str(most)
        headers["x-ratelimit-remaining-tokens"] = str(max(0, math.floor(reading.level + EPSILON)))
        headers["x-ratelimit-reset-tokens"] = duration(_fill_ms(most, most - reading.level))
    return headers


def refusal(demand: Demand, limits: TierLimits, reading: Reading, window_ms: float) -> LimitRefused:
    """Return the refusal of a request, for the limit with the longest wait."""
    waits = _waits(demand, limits, reading, window_ms)
    limit, (most, wait_ms) = max(waits.items(), key=lambda item: item[1][1])
    retry_s = min(MAX_RETRY_S, max(1, math.ceil(min(wait_ms / 1000, MAX_RETRY_S) - EPSILON)))
    unit = "requests at once" if limit == "concurrency" else f"{limit} a minute"
    return LimitRefused(
        limit,
        f"key {demand.key.name} has reached its limit of {most} {unit} in tier {demand.tier.label}; retry after {retry_s} s",
        retry_s,
        headers_of(limits, reading, window_ms),
    )


def _waits(
    demand: Demand, limits: TierLimits, reading: Reading, window_ms: float
) -> dict[str, tuple[int, float]]:
    """Return the reached limits, with the time until each admits the request."""
    waits = {}
    if (most := limits.concurrency) is not None and reading.running >= most:
        waits["concurrency"] = (most, CONCURRENCY_RETRY_S * 1000.0)
    if (most := limits.tokens_per_minute) is not None:
        cost = min(demand.tokens, most)
        if most <= 0 or reading.level < cost - EPSILON:
            waits["tokens"] = (most, _fill_ms(most, cost - reading.level))
    if (most := limits.requests_per_minute) is not None:
        wait_ms = reading.window.wait_ms(most, window_ms)
        if wait_ms > 0:
            waits["requests"] = (most, wait_ms)
    return waits


def _fill_ms(limit: int, tokens: float) -> float:
    """Return the time in which the bucket gains this many tokens."""
    return math.inf if limit <= 0 else max(0.0, tokens) * MINUTE_MS / limit
