"""Limits in memory: of a replica without Redis, and while Redis does not answer.

The rules are those of the scripts (lua/); a test compares both. The library's own storage in memory is
not used, because each request would iterate over the windows of all keys to find the expired ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetkeeper_gateway.interfaces import TierLimits
from fleetkeeper_gateway.limits.rules import EPSILON, MINUTE_MS, Reading, Window

Place = tuple[str, str]
"""ID of a client's key, and the label of a tier."""


def monotonic_ms() -> int:
    """Return the monotonic time in whole ms."""
    return int(time.monotonic() * 1000)


class Running:
    """Running requests of this replica that a concurrency limit counts."""

    def __init__(self) -> None:
        self._ids: dict[Place, set[str]] = {}

    def add(self, place: Place, request_id: str) -> None:
        """Add a request."""
        self._ids.setdefault(place, set()).add(request_id)

    def remove(self, place: Place, request_id: str) -> None:
        """Remove a request, if it is there."""
        ids = self._ids.get(place)
        if ids is not None:
            ids.discard(request_id)
            if not ids:
                del self._ids[place]

    def count(self, place: Place) -> int:
        """Return the number of requests of a key in a tier."""
        return len(self._ids.get(place, ()))

    def all(self) -> list[tuple[Place, list[str]]]:
        """Return all requests."""
        return [(place, list(ids)) for place, ids in self._ids.items()]


@dataclass(slots=True)
class _Requests:
    """The sliding window counter. Expiry times are in ms; 0: no such window."""

    before: int = 0
    before_until: int = 0
    current: int = 0
    current_until: int = 0

    def shift(self, now: int, window_ms: int) -> Window:
        """Drop expired counts, and return the current window."""
        if self.current_until < now:
            self.current = self.current_until = 0
        if self.before_until < now:
            self.before = self.before_until = 0
        if 0 < self.current_until - now < window_ms:
            self.before, self.before_until = self.current, self.current_until
            self.current, self.current_until = 0, self.current_until + window_ms
        return Window(
            self.before,
            max(0, self.before_until - now),
            self.current,
            max(0, self.current_until - now),
        )

    def add(self, now: int, window_ms: int) -> None:
        """Count a request."""
        if not self.current_until:
            self.current_until = now + 2 * window_ms
        self.current += 1


@dataclass(slots=True)
class _Tokens:
    """The token bucket, and the estimates of open requests."""

    level: float
    at: int
    limit: int
    held: dict[str, float] = field(default_factory=dict)

    def fill(self, now: int, limit: int) -> None:
        """Add the tokens that accrued since the last call."""
        level = self.level + max(0, now - self.at) * limit / MINUTE_MS
        self.level, self.at, self.limit = min(float(limit), level), now, limit

    def give(self, now: int, tokens: float) -> None:
        """Add tokens; a negative number takes them, even below zero."""
        self.fill(now, self.limit)
        self.level = min(float(self.limit), self.level + tokens)


@dataclass(slots=True)
class _State:
    requests: _Requests = field(default_factory=_Requests)
    tokens: _Tokens | None = None


class LocalLimits:
    """The limits of all keys, in this process."""

    def __init__(
        self, running: Running, window_ms: int, clock: Callable[[], int] = monotonic_ms
    ) -> None:
        self._running = running
        self._window_ms = window_ms
        self._clock = clock
        self._states: dict[Place, _State] = {}

    def admit(self, place: Place, request_id: str, limits: TierLimits, tokens: int) -> Reading:
        """Reserve all amounts of a request, or none if a limit is reached."""
        now = self._clock()
        state = self._states.setdefault(place, _State())
        running, most = self._running.count(place), limits.concurrency
        bucket = _bucket(state, limits.tokens_per_minute, now)
        window = state.requests.shift(now, self._window_ms)
        cost = 0 if bucket is None else min(tokens, bucket.limit)
        admitted = (
            (most is None or running < most)
            and (bucket is None or (bucket.limit > 0 and bucket.level >= cost - EPSILON))
            and window.wait_ms(_unless_none(limits.requests_per_minute), self._window_ms) <= 0
        )
        if admitted and limits.requests_per_minute is not None:
            state.requests.add(now, self._window_ms)
            window = state.requests.shift(now, self._window_ms)
        if admitted and bucket is not None:
            bucket.level -= cost
            bucket.held[request_id] = cost
        level = 0.0 if bucket is None else bucket.level
        return Reading(admitted, running + (admitted and most is not None), level, window)

    def learn(self, place: Place, limits: TierLimits, reading: Reading) -> None:
        """Store the last reading of the shared limits, as the start of the local limits.

        Requests are those that this replica admitted; the level of tokens is that of all replicas.
        """
        now = self._clock()
        state = self._states.setdefault(place, _State())
        if limits.requests_per_minute is not None and reading.admitted:
            state.requests.shift(now, self._window_ms)
            state.requests.add(now, self._window_ms)
        bucket = _bucket(state, limits.tokens_per_minute, now)
        if bucket is not None:
            bucket.level = reading.level

    def release(self, place: Place, request_id: str, *, sent: bool) -> None:
        """End a request. It is not settled afterwards, so the estimate of a sent request stands."""
        bucket = self._tokens(place)
        if bucket is not None:
            cost = bucket.held.pop(request_id, 0.0)
            if not sent:
                bucket.give(self._clock(), cost)

    def settle(self, place: Place, request_id: str, tokens: int) -> None:
        """Replace the estimate of an open request."""
        bucket = self._tokens(place)
        if bucket is not None and request_id in bucket.held:
            bucket.give(self._clock(), bucket.held.pop(request_id) - tokens)

    def prune(self) -> None:
        """Drop the keys whose limits are all unused again."""
        now = self._clock()
        for place, state in list(self._states.items()):
            window = state.requests.shift(now, self._window_ms)
            if not (window.before or window.current) and _is_full(state.tokens, now):
                del self._states[place]

    def __len__(self) -> int:
        """Return the number of pairs of key and tier in memory."""
        return len(self._states)

    def _tokens(self, place: Place) -> _Tokens | None:
        state = self._states.get(place)
        return None if state is None else state.tokens


def _bucket(state: _State, limit: int | None, now: int) -> _Tokens | None:
    """Return the bucket, filled up to now; None without a limit."""
    if limit is None:
        return None
    if state.tokens is None:
        state.tokens = _Tokens(float(limit), now, limit)
    state.tokens.fill(now, limit)
    return state.tokens


def _is_full(bucket: _Tokens | None, now: int) -> bool:
    if bucket is None:
        return True
    bucket.fill(now, bucket.limit)
    return not bucket.held and bucket.level >= bucket.limit


def _unless_none(limit: int | None) -> float:
    return float("inf") if limit is None else limit
