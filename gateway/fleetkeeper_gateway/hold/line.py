"""The requests that wait for one service: their order, and how fast they may try.

Pure but for the futures that its requests wait for: `Line.step` gets the service and the time.

A hold ends by a connection that the service accepts, not by the status. So the first request in the order
tries again and again. Once it is accepted, more may try at once, and fewer after a refusal: a replica that
just started is not flooded.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Hashable
from typing import Final

from fleetkeeper_contract.sleep import MAX_RETRY_AFTER_S, SleepState
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold.states import retry_after_s
from fleetkeeper_gateway.interfaces import HoldRefused, Service

PERIOD_S: Final = 0.25
"""Time from a refused attempt to the next one, and time after which a connected attempt counts as accepted."""
DECISION_S: Final = 5.0
"""Time in which the operator ends or completes the step to sleep. Until then its pods get no request."""
AWAKE_WAIT_S: Final = 10.0
"""Time that requests wait for a service that is awake but takes none, as they do without a hold."""
_STALE_ENTRIES: Final = 64

Order = tuple[Tier, int, int]


class Waiter:
    """A held request in its line."""

    __slots__ = (
        "connected_at",
        "deadline",
        "ended_at",
        "is_waiting",
        "joined",
        "model",
        "order",
        "outcome",
        "tenant",
        "tier",
        "turn",
    )

    def __init__(self, tier: Tier, tenant: Hashable, model: str, now: float, hold_s: float) -> None:
        self.tier = tier
        self.tenant = tenant
        self.model = model
        self.joined = now
        self.deadline = now + hold_s
        self.order: Order = (tier, 0, 0)
        self.is_waiting = False
        self.turn: asyncio.Future[HoldRefused | None] = asyncio.get_running_loop().create_future()
        """Gets None when the request may try, or why it is not held anymore."""
        self.connected_at = math.inf
        """Time at which the attempt had a connection; infinite before."""
        self.outcome = "aborted"
        self.ended_at = math.inf


class Line:
    """The held requests of one service, in the order: tier, round of their tenants, arrival."""

    def __init__(self, path: str, hold_s: float, now: float) -> None:
        self.path = path
        self.waiters: dict[Waiter, None] = {}
        """All requests in order of arrival, those that were accepted and have no answer yet included."""
        self.trying: dict[Waiter, None] = {}
        self.changed = asyncio.Event()
        """Set if a step is due."""
        self.window = 1
        """Number of attempts at once."""
        self.awake_since = math.inf
        self.is_served = False
        """True while a task steps through the line."""
        self._hold_s = hold_s
        self._heap: list[tuple[Order, Waiter]] = []
        self._waiting: Counter[tuple[Tier, Hashable]] = Counter()
        self._waiting_count = 0
        self._rounds: Counter[Tier] = Counter()
        self._numbers = itertools.count()
        self._service: Service | None = None
        self._failures = 0
        self._retry_s = 1
        self._pause_until = now
        self._alive_at = now
        """Time until which refused connections are expected, or at which the service last answered."""

    @property
    def held(self) -> int:
        """Return the number of requests that no replica has accepted."""
        return self._waiting_count + len(self.trying)

    @property
    def tier(self) -> Tier:
        """Return the most urgent tier that is held."""
        tiers = [tier for tier, _ in self._waiting] + [waiter.tier for waiter in self.trying]
        return min(tiers, default=Tier.STANDARD)

    def join(self, tier: Tier, tenant: Hashable, model: str, now: float) -> Waiter:
        """Add a request behind those of its tier. Each round has one request of each tenant."""
        waiter = Waiter(tier, tenant, model, now, self._hold_s)
        turn = self._rounds[tier] + self._waiting[tier, tenant]
        waiter.order = (tier, turn, next(self._numbers))
        self.waiters[waiter] = None
        self._enqueue(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove a request whose hold ended in any way."""
        self._dequeue(waiter)
        self.trying.pop(waiter, None)
        del self.waiters[waiter]
        self.changed.set()

    def connected(self, waiter: Waiter, now: float) -> None:
        """Note that an attempt has a connection."""
        waiter.connected_at = now
        self.changed.set()

    def accepted(self, waiter: Waiter, now: float) -> None:
        """Count an attempt as accepted: one more may try at once, so their number doubles in each round."""
        if waiter in self.trying:
            del self.trying[waiter]
            self.window += 1
            self._alive_at = now
            _end(waiter, "sent", now)
            self.changed.set()

    def refused(self, waiter: Waiter, now: float, *, is_shed: bool) -> None:
        """Return a request to its place after an attempt that no replica took."""
        self.trying.pop(waiter, None)
        _end(waiter, "aborted", math.inf)
        waiter.turn = asyncio.get_running_loop().create_future()
        self._enqueue(waiter)
        self.window = max(1, self.window // 2)
        self._pause_until = now + PERIOD_S
        if is_shed:
            self._alive_at = now
        elif now - self._alive_at > AWAKE_WAIT_S:
            why = f"No replica of {self.path} takes requests now."
            self.end_all("service_unavailable", why, self._retry_s, now)

    def end_all(self, code: str, why: str, retry_s: int, now: float) -> None:
        """End the hold of all requests that are not being tried."""
        for waiter in [waiter for waiter in self.waiters if waiter.is_waiting]:
            self._end(waiter, HoldRefused(code, why, retry_s), now)

    def step(self, now: float, service: Service | None, age_s: float) -> float:
        """Let requests try, and end the holds that are over. Return the seconds until the next step.

        Args:
            now: monotonic time.
            service: the present service; None if it is gone.
            age_s: seconds since the state of its sleep was first seen.
        """
        if service is None:
            self.end_all("service_unavailable", f"{self.path} was deleted.", self._retry_s, now)
            return PERIOD_S
        self._retry_s = retry_after_s(service.sleep, age_s)
        self._compare(service, now)
        for waiter in [waiter for waiter in self.trying if now - waiter.connected_at >= PERIOD_S]:
            self.accepted(waiter, now)
        self._expire(now)
        if now >= self._pause_until and not self._is_undecided(service, now):
            self._let_try()
        due = [waiter.connected_at + PERIOD_S for waiter in self.trying] + [self._pause_until]
        return min([PERIOD_S, *(at - now for at in due if at > now)])

    def _is_undecided(self, service: Service, now: float) -> bool:
        """Return whether the operator still has time to end or complete the step to sleep."""
        sleep, first = service.sleep, next(iter(self.waiters), None)
        if sleep is None or sleep.state is not SleepState.GOING_TO_SLEEP or first is None:
            return False
        return now - first.joined < DECISION_S

    def _compare(self, service: Service, now: float) -> None:
        """End what a change of the service ends."""
        sleep = service.sleep
        if sleep is not None:
            self._alive_at, self.awake_since = now, math.inf
        elif self.awake_since == math.inf:
            self.awake_since = now
        before, self._service = self._service, service
        if service is before:
            return
        failures, self._failures = self._failures, sleep.failures if sleep is not None else 0
        is_asleep = sleep is not None and sleep.state is SleepState.ASLEEP
        if before is not None and is_asleep and self._failures > failures:
            why = f"{self.path} could not start. Its owner sees why in its status."
            self.end_all("wake_failed", why, MAX_RETRY_AFTER_S, now)
        for waiter in [waiter for waiter in self.waiters if waiter.is_waiting]:
            if waiter.model not in service.models:
                why = f"{self.path} does not serve the model anymore."
                self._end(waiter, HoldRefused("model_not_found", why, self._retry_s), now)

    def _expire(self, now: float) -> None:
        expired = itertools.takewhile(lambda waiter: waiter.deadline <= now, self.waiters)
        why = f"No replica of {self.path} took the request in time."
        for waiter in [waiter for waiter in expired if waiter.is_waiting]:
            self._end(waiter, HoldRefused("service_waking", why, self._retry_s), now)

    def _let_try(self) -> None:
        while self._heap and len(self.trying) < self.window:
            _, waiter = heapq.heappop(self._heap)
            if waiter.is_waiting:
                self._dequeue(waiter)
                self._rounds[waiter.tier] = waiter.order[1]
                self.trying[waiter] = None
                waiter.connected_at = math.inf
                _resolve(waiter, None)

    def _end(self, waiter: Waiter, refused: HoldRefused, now: float) -> None:
        self._dequeue(waiter)
        _end(waiter, refused.code, now)
        _resolve(waiter, refused)

    def _enqueue(self, waiter: Waiter) -> None:
        waiter.is_waiting = True
        self._waiting[waiter.tier, waiter.tenant] += 1
        self._waiting_count += 1
        heapq.heappush(self._heap, (waiter.order, waiter))
        self.changed.set()

    def _dequeue(self, waiter: Waiter) -> None:
        """Stop to wait. The entry in the heap stays until it is the first, or until most are stale."""
        if not waiter.is_waiting:
            return
        waiter.is_waiting = False
        place = waiter.tier, waiter.tenant
        self._waiting[place] -= 1
        self._waiting_count -= 1
        if not self._waiting[place]:
            del self._waiting[place]
        if len(self._heap) > 2 * self._waiting_count + _STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].is_waiting]
            heapq.heapify(self._heap)


def _end(waiter: Waiter, outcome: str, now: float) -> None:
    waiter.outcome, waiter.ended_at = outcome, now


def _resolve(waiter: Waiter, outcome: HoldRefused | None) -> None:
    if not waiter.turn.done():  # cancelled: its client is gone, and it leaves
        waiter.turn.set_result(outcome)
