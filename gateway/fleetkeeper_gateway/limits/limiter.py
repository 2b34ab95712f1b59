"""The limits of all keys: shared in Redis, or local to this replica while Redis does not answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.interfaces import (
    NO_LIMITS,
    Admission,
    Demand,
    Key,
    LimitRefused,
    TierLimits,
)
from fleetkeeper_gateway.limits.link import Link, Timing, Unavailable
from fleetkeeper_gateway.limits.local import LocalLimits, Place, Running
from fleetkeeper_gateway.limits.metrics import LimitMetrics
from fleetkeeper_gateway.limits.names import names_of
from fleetkeeper_gateway.limits.pipe import Arguments
from fleetkeeper_gateway.limits.rules import Closed, Reading, Window, headers_of, refusal
from fleetkeeper_gateway.limits.scripts import ADMIT, RELEASE, RENEW, SETTLE

MAX_OWED = 10_000
"""Maximum ends of requests that are kept for Redis while it does not answer. Leases and TTLs cover the rest."""
RENEW_BATCH = 1000


class _Unlimited:
    """A request without limits."""

    headers: Mapping[str, str] = {}

    async def release(self, *, sent: bool, least: int = 0) -> None:
        """Do nothing: nothing was taken."""


UNLIMITED: Admission = _Unlimited()


@dataclass(slots=True)
class _Admission:
    limiter: KeyLimiter
    place: Place
    request_id: str
    limits: TierLimits
    headers: Mapping[str, str]
    asked: bool
    """True if Redis may have counted the request."""
    released: bool = False

    async def release(self, *, sent: bool, least: int = 0) -> None:
        """End the request. Idempotent."""
        if not self.released:
            self.released = True
            await self.limiter.end(self, sent=sent, least=least)


class _End(NamedTuple):
    """The end of a request, for Redis."""

    place: Place
    request_id: str
    sent: bool
    least: int
    """Minimum cost in tokens, also if the engine counts fewer."""


class KeyLimiter:
    """The limits of all keys; without a link, local limits."""

    def __init__(self, timing: Timing, metrics: LimitMetrics) -> None:
        self._timing = timing
        self._metrics = metrics
        self._window_ms = timing.window_s * 1000
        self._running = Running()
        self._local = LocalLimits(self._running, self._window_ms)
        self._link: Link | None = None
        self._closed: dict[Place, Closed] = {}
        self._owed: deque[_End] = deque(maxlen=MAX_OWED)
        self._keeper: asyncio.Task[None] | None = None

    def share(self, link: Link) -> None:
        """Share the limits over this link."""
        self._link = link

    def start(self) -> None:
        """Start to connect and to renew leases. Without this call, the first request does both."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
            if self._link is not None:
                self._link.start()

    async def admit(self, demand: Demand) -> Admission:
        """Reserve the amounts of a request.

        Raises:
            LimitRefused: if a limit is reached. No limit is changed then.
        """
        limits = demand.key.limits.get(demand.tier, NO_LIMITS)
        if limits == NO_LIMITS:
            return UNLIMITED
        self.start()
        place = (demand.key.id, demand.tier.label)
        reading, asked = await self._take(place, demand, limits)
        if not reading.admitted:
            self._closed[place] = Closed(asyncio.get_running_loop().time(), reading)
            raise self._refused(demand, limits, reading)
        if limits.concurrency is not None:
            self._running.add(place, demand.request_id)
        headers = headers_of(limits, reading, self._window_ms)
        return _Admission(self, place, demand.request_id, limits, headers, asked)

    def check(self, key: Key, tier: Tier) -> None:
        """Refuse a request of any size without a call to Redis, if another request was just refused.

        Raises:
            LimitRefused: if the limit of requests is reached for longer.
        """
        place = (key.id, tier.label)
        limits, closed = key.limits.get(tier), self._closed.get(place)
        if closed is None or limits is None:
            return
        reading = closed.reading_at(asyncio.get_running_loop().time())
        most = limits.requests_per_minute
        if reading is None or most is None or reading.window.wait_ms(most, self._window_ms) <= 0:
            del self._closed[place]
            return
        raise self._refused(Demand(key, tier, "", 0), limits, reading)

    def _refused(self, demand: Demand, limits: TierLimits, reading: Reading) -> LimitRefused:
        refused = refusal(demand, limits, reading, self._window_ms)
        self._metrics.refused.labels(refused.limit).inc()
        return refused

    async def end(self, admission: _Admission, *, sent: bool, least: int) -> None:
        """Release the reservation of an admission."""
        place, request_id = admission.place, admission.request_id
        self._running.remove(place, request_id)
        self._local.release(place, request_id, sent=sent)
        limits = admission.limits
        if limits.concurrency is None and limits.tokens_per_minute is None:
            return
        self._send_end(_End(place, request_id, sent, least), asked=admission.asked)
        # Lets the connection's writer run, so that Redis gets the end before the client gets its answer.
        # Redis' reply is not awaited: the client's next request arrives later in any case.
        await asyncio.sleep(0)

    async def settle(self, key_id: str, tier: Tier, request_id: str, tokens: int) -> None:
        """Replace a request's estimate by the tokens that the engine counted. The bucket may become negative.

        While Redis does not answer, the estimate stands, and a metric counts it.
        """
        link = self._link
        if link is None:
            self._local.settle((key_id, tier.label), request_id, tokens)
            return
        self.start()
        budget_s = self._timing.settle_budget_s
        await link.first_attempt(budget_s)
        names = names_of(key_id, tier.label)
        try:
            await link.run(SETTLE, names.settle, (request_id, tokens, self._orphan_ms), budget_s)
        except Unavailable:
            self._metrics.unsettled.inc()

    async def close(self) -> None:
        """Close connections."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    @property
    def _orphan_ms(self) -> int:
        return int(self._timing.orphan_s * 1000)

    async def _take(self, place: Place, demand: Demand, limits: TierLimits) -> tuple[Reading, bool]:
        """Return the reading of the limits, and True if Redis may have counted the request."""
        asked = False
        if self._link is not None:
            await self._link.first_attempt(self._timing.budget_s)
            try:
                reading = await self._take_shared(self._link, place, demand, limits)
            except Unavailable as error:
                asked = error.asked
            else:
                self._local.learn(place, limits, reading)
                return reading, True
        reading = self._local.admit(place, demand.request_id, limits, demand.tokens)
        if asked and not reading.admitted:
            self._owed.append(_End(place, demand.request_id, sent=False, least=0))
        return reading, asked

    async def _take_shared(
        self, link: Link, place: Place, demand: Demand, limits: TierLimits
    ) -> Reading:
        timing = self._timing
        arguments: Arguments = (
            demand.request_id,
            *(-1 if most is None else most for most in (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency)),
            demand.tokens,
            timing.window_s,
            int(timing.lease_s * 1000),
            self._orphan_ms,
        )  # fmt: skip
        begin = asyncio.get_running_loop().time()
        try:
            answer = await link.run(ADMIT, names_of(*place).admit, arguments, timing.budget_s)
        except asyncio.CancelledError:
            # The client disconnected. The reservation in Redis is released afterwards.
            self._send_end(_End(place, demand.request_id, sent=False, least=0), asked=True)
            raise
        self._metrics.seconds.observe(asyncio.get_running_loop().time() - begin)
        return reading_of(answer)

    def _send_end(self, end: _End, *, asked: bool) -> None:
        """Send the end of a request to Redis, or keep it until Redis answers again."""
        if self._link is None:
            return
        arguments = (end.request_id, int(end.sent), self._orphan_ms, end.least)
        names, budget_s = names_of(*end.place), self._timing.budget_s
        try:
            answer = self._link.send(RELEASE, names.release, arguments, budget_s)
        except Unavailable:
            if asked:
                self._owed.append(end)
            return
        answer.add_done_callback(partial(self._end_sent, end))

    def _end_sent(self, end: _End, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._owed.append(end)

    def caught_up(self) -> None:
        """Send Redis, which answers again, the kept ends of requests and the running requests."""
        owed = list(self._owed)
        self._owed.clear()
        for end in owed:
            self._send_end(end, asked=True)
        self._renew()

    def _renew(self) -> None:
        """Renew all leases of this replica, without waiting."""
        if self._link is None or not self._link.up:
            return
        lease_ms = int(self._timing.lease_s * 1000)
        for place, ids in self._running.all():
            for start in range(0, len(ids), RENEW_BATCH):
                batch: Arguments = (lease_ms, *ids[start : start + RENEW_BATCH])
                self._link.send(RENEW, names_of(*place).renew, batch, self._timing.settle_budget_s)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._timing.renew_s)
            self._renew()
            self._local.prune()
            now = asyncio.get_running_loop().time()
            for place, closed in list(self._closed.items()):
                if closed.reading_at(now) is None:
                    del self._closed[place]


def reading_of(answer: bytes) -> Reading:
    """Parse the reply of the admission script."""
    admitted, running, level, before, before_ms, current, current_ms = answer.split()
    window = Window(int(before), max(0, int(before_ms)), int(current), max(0, int(current_ms)))
    return Reading(admitted == b"1", int(running), float(level), window)
