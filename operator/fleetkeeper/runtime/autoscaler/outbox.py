"""A tick's requests to others: limits to engines, events, and pod replacements.

A tick leaves them here, and workers carry them out without delaying the next tick. A newer limits
request to the same pod replaces one that is not sent yet. Pods that refused or did not answer have a
lane of their own, so that a thousand dead pods do not delay the limits lease of a serving one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import structlog

from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.event_recorder import DRAIN_S
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)

AT_ONCE: Final = 256
"""Limits requests per batch to pods that answered last time; 64 of them are in flight."""
DOUBTED_AT_ONCE: Final = 8
"""Limits requests per batch to other pods: an eighth of the slots, so the rest stay free."""
ACTS_KEPT: Final = 4096
"""Events that can wait; beyond this the oldest are dropped."""


class Engines(Protocol):
    """The engines' control ports."""

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """Send each request to its pod; return an outcome for each, whatever happens."""


class ReplacePod(Protocol):
    """A function that replaces one pod."""

    async def __call__(self, key: Key, pod: PodView, removal: Removal) -> bool:
        """Delete exactly this pod if it confirms the cause; return whether it was deleted."""


class PostFleetEvent(Protocol):
    """A function that posts one event about the fleet."""

    async def __call__(self, event: Event) -> None:
        """Post the event; a refusal is only logged, because events are for people."""


class PostEvent(Protocol):
    """A function that posts one event on a service."""

    async def __call__(self, key: Key, event: Event) -> None:
        """Post the event; a refusal is only logged, because events are for people."""


Tell = Callable[[PutOutcome], None]
Act = Callable[[], Awaitable[None]]
Waiting = tuple[Key, LimitsRequest, Tell]


class Outbox:
    """Waiting limits requests, events and replacements, and the workers that carry them out."""

    def __init__(
        self,
        engines: Engines,
        replace_pod: ReplacePod,
        post_event: PostEvent,
        post_fleet_event: PostFleetEvent,
        *,
        metrics: ControlMetrics,
        defects: Defects,
    ) -> None:
        self._engines = engines
        self._replace_pod = replace_pod
        self._post_event = post_event
        self._post_fleet_event = post_fleet_event
        self._metrics = metrics
        self._defects = defects
        self._requests: dict[str, Waiting] = {}
        self._doubted: dict[str, Waiting] = {}
        self._acts: deque[tuple[Key | None, Act]] = deque(maxlen=ACTS_KEPT)
        self._removals: dict[str, tuple[Key, PodView, Removal]] = {}
        self._news = asyncio.Event()
        self._doubts = asyncio.Event()
        self._act_news = asyncio.Event()
        self._removal_news = asyncio.Event()

    def send(self, key: Key, request: LimitsRequest, tell: Tell, *, doubted: bool) -> None:
        """Queue limits for a pod of the service `key`; `tell` is called with the outcome.

        `doubted`: the last request to this pod failed.
        """
        self._requests.pop(request.uid, None)
        self._doubted.pop(request.uid, None)
        lane, news = (self._doubted, self._doubts) if doubted else (self._requests, self._news)
        lane[request.uid] = (key, request, tell)
        news.set()

    def post(self, key: Key, event: Event) -> None:
        """Queue an event on a service."""
        self._add(key, lambda: self._post_event(key, event))

    def post_fleet(self, event: Event) -> None:
        """Queue an event about the fleet."""
        self._add(None, lambda: self._post_fleet_event(event))

    def replace(self, key: Key, pod: PodView, removal: Removal) -> None:
        """Queue the replacement of a pod that confirms the cause; its ReplicaSet creates another.

        Removals have a worker of their own: each waits for a pod's answer, and events must not.
        """
        self._removals[pod.uid] = (key, pod, removal)
        self._removal_news.set()

    async def run(self) -> None:
        """Carry out what is queued until cancelled.

        Raises:
            ExceptionGroup: with LeaseLost, when this process must not write anymore.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(self._news, self._send_some), name="limits")
            group.create_task(self._work(self._doubts, self._send_doubted), name="doubted limits")
            group.create_task(self._work(self._act_news, self._act_once), name="events")
            group.create_task(self._work(self._removal_news, self._remove_once), name="removals")

    async def drain(self) -> None:
        """Carry out everything that is queued, then return."""
        while (
            await self._send_some()
            or await self._send_doubted()
            or await self._remove_once()
            or await self._act_once()
        ):
            continue

    async def drain_acts(self) -> None:
        """Carry out the queued events for at most `DRAIN_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while await self._act_once():
                    continue

    def _add(self, key: Key | None, act: Act) -> None:
        if len(self._acts) == ACTS_KEPT:
            log.warning("event dropped: queue full", waiting=ACTS_KEPT)
        self._acts.append((key, act))
        self._act_news.set()

    async def _work(self, news: asyncio.Event, step: Callable[[], Awaitable[bool]]) -> None:
        while True:
            await news.wait()
            news.clear()
            while await step():
                continue

    async def _send_some(self) -> bool:
        return await self._send_from(self._requests, AT_ONCE)

    async def _send_doubted(self) -> bool:
        return await self._send_from(self._doubted, DOUBTED_AT_ONCE)

    async def _send_from(self, lane: dict[str, Waiting], count: int) -> bool:
        """Send one batch; return whether there was anything to send."""
        some = [lane.pop(uid) for uid in list(lane)[:count]]
        if not some:
            return False
        await self._send(some)
        return True

    async def _send(self, some: Sequence[Waiting]) -> None:
        """Send a batch of limits requests. If the batch fails, send each of them on its own."""
        key = some[0][0] if len(some) == 1 else None
        with self._defects.contained("send_limits", key) as step:
            outcomes = await self._engines.put_limits([request for _, request, _ in some])
            for (of, _, tell), outcome in zip(some, outcomes, strict=True):
                self._metrics.puts.labels("ok" if outcome.succeeded else "failed").inc()
                with self._defects.contained("send_limits", of):
                    tell(outcome)
        if step.failed and key is None:
            for one in some:
                await self._send([one])

    async def _act_once(self) -> bool:
        if not self._acts:
            return False
        key, act = self._acts.popleft()
        with self._defects.contained("act", key):
            await act()
        return True

    async def _remove_once(self) -> bool:
        if not self._removals:
            return False
        key, pod, removal = self._removals.pop(next(iter(self._removals)))
        with self._defects.contained("act", key):
            if await self._replace_pod(key, pod, removal):
                self.post(key, removal.event)
        return True
