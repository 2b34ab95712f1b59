"""What a tick decided and others have to be asked for: limits to engines, events, pods replaced.

None of it holds up the next tick: a tick leaves it here, and workers carry it out. A newer order to
the same pod takes the place of one that was not sent yet. Pods that refused or did not answer wait
in a lane of their own, so that a thousand dead ones do not delay the lease of one that serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import structlog

from fleetkeeper.plan.control.values import PodOrder, PutOutcome
from fleetkeeper.plan.model import Notice
from fleetkeeper.runtime.control_metrics import ControlMetrics
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)

AT_ONCE: Final = 256
"""Orders of one round to pods that answered last time; 16 of them are in flight."""
DOUBTED_AT_ONCE: Final = 8
"""To pods that did not: half of the slots, so that the others always have theirs."""
ACTS_KEPT: Final = 4096
"""Events and replacements that wait; beyond it the oldest are let go."""
DEFECTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a defect of ours raises: logged and counted, and the loop goes on."""


class Engines(Protocol):
    """The engines' control ports."""

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """Sends each order to its pod; an outcome each, whatever happened."""


class ReplacePod(Protocol):
    """Replaces one pod."""

    async def __call__(self, key: Key, pod: str, uid: str, why: str) -> None:
        """Deletes it, this one only; `why` is for the log."""


class PostNotice(Protocol):
    """Posts one event on a service."""

    async def __call__(self, key: Key, notice: Notice) -> None:
        """For people; a refusal is logged and let go."""


Tell = Callable[[PutOutcome], None]
Act = Callable[[], Awaitable[None]]


class Outbox:
    """Orders and acts that wait, and the workers that carry them out."""

    def __init__(
        self,
        engines: Engines,
        replace_pod: ReplacePod,
        post_notice: PostNotice,
        metrics: ControlMetrics,
    ) -> None:
        self._engines = engines
        self._replace_pod = replace_pod
        self._post_notice = post_notice
        self._metrics = metrics
        self._orders: dict[str, tuple[PodOrder, Tell]] = {}
        self._doubted: dict[str, tuple[PodOrder, Tell]] = {}
        self._acts: deque[Act] = deque(maxlen=ACTS_KEPT)
        self._news = asyncio.Event()
        self._doubts = asyncio.Event()
        self._act_news = asyncio.Event()

    def send(self, order: PodOrder, tell: Tell, *, doubted: bool) -> None:
        """Limits for a pod; `tell` gets what came of it. `doubted`: its last order failed."""
        self._orders.pop(order.uid, None)
        self._doubted.pop(order.uid, None)
        lane, news = (self._doubted, self._doubts) if doubted else (self._orders, self._news)
        lane[order.uid] = (order, tell)
        news.set()

    def post(self, key: Key, notice: Notice) -> None:
        """An event on a service."""
        self._add(lambda: self._post_notice(key, notice))

    def replace(self, key: Key, pod: str, uid: str, why: str) -> None:
        """A pod goes, and its ReplicaSet makes another."""
        self._add(lambda: self._replace_pod(key, pod, uid, why))

    async def run(self) -> None:
        """Works until cancelled.

        Raises:
            ExceptionGroup: with LeaseLost, when this process may not write any more.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(self._news, self._send_some), name="limits")
            group.create_task(self._work(self._doubts, self._send_doubted), name="doubted limits")
            group.create_task(self._work(self._act_news, self._act_once), name="events")

    async def drain(self) -> None:
        """Carries out all that waits now, and returns."""
        while await self._send_some() or await self._send_doubted() or await self._act_once():
            continue

    def _add(self, act: Act) -> None:
        if len(self._acts) == ACTS_KEPT:
            log.warning("an event was let go: too many wait", waiting=ACTS_KEPT)
        self._acts.append(act)
        self._act_news.set()

    async def _work(self, news: asyncio.Event, step: Callable[[], Awaitable[bool]]) -> None:
        while True:
            await news.wait()
            news.clear()
            while await step():
                continue

    async def _send_some(self) -> bool:
        return await self._send_from(self._orders, AT_ONCE)

    async def _send_doubted(self) -> bool:
        return await self._send_from(self._doubted, DOUBTED_AT_ONCE)

    async def _send_from(self, lane: dict[str, tuple[PodOrder, Tell]], count: int) -> bool:
        """One round; whether there was anything to send."""
        some = [lane.pop(uid) for uid in list(lane)[:count]]
        if not some:
            return False
        try:
            outcomes = await self._engines.put_limits([order for order, _ in some])
        except DEFECTS:
            log.exception("orders not sent")
            self._metrics.failures.inc()
            return True
        for (_, tell), outcome in zip(some, outcomes, strict=True):
            self._metrics.puts.labels("ok" if outcome.succeeded else "failed").inc()
            tell(outcome)
        return True

    async def _act_once(self) -> bool:
        if not self._acts:
            return False
        act = self._acts.popleft()
        try:
            await act()
        except DEFECTS:
            log.exception("not carried out")
            self._metrics.failures.inc()
        return True
