"""Dispatch of a tick's requests: limits to engines, and pod replacements.

A tick queues them here, and workers carry them out without delaying the next tick. Pods whose last
limits request failed have a lane of their own, so that a thousand dead pods do not delay the limits
lease of a serving one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)

BATCH: Final = 256
"""Limits requests per batch to pods that answered last time; 64 of them are in flight."""
RETRY_BATCH: Final = 8
"""Limits requests per batch to other pods: an eighth of the slots, so the rest stay free."""
FAILURE_KEPT_S: Final = 600.0
"""Time for which a pod's failure is remembered. Then the pod is gone, or its next failure is logged again."""

Item = TypeVar("Item")
ReplacePod = Callable[[Key, PodView, Removal], Awaitable[bool]]
"""Deletes exactly this pod if it confirms the cause; returns whether it was deleted."""
RecordEvent = Callable[[Key, Event], None]
"""Queues an event on a service."""


class Engines(Protocol):
    """The engines' control ports."""

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """Send each request to its pod; return an outcome for each, also after errors."""


class Lane(Generic[Item]):
    """Items that wait, at most one per pod (by UID), and the step that carries out a batch."""

    def __init__(self, batch: int, step: Callable[[Sequence[Item]], Awaitable[None]]) -> None:
        self._batch = batch
        self._step = step
        self._waiting: dict[str, Item] = {}
        self._added = asyncio.Event()

    def put(self, uid: str, item: Item) -> None:
        """Queue an item; it replaces one for the same pod."""
        self._waiting[uid] = item
        self._added.set()

    def discard(self, uid: str) -> None:
        """Drop the waiting item for a pod."""
        self._waiting.pop(uid, None)

    async def run(self) -> None:
        """Carry out what is queued, oldest first; never return."""
        while True:
            await self._added.wait()
            self._added.clear()
            await self.finish()

    async def finish(self) -> None:
        """Carry out what is queued, oldest first, until nothing waits."""
        while self._waiting:
            uids = list(self._waiting)[: self._batch]
            await self._step([self._waiting.pop(uid) for uid in uids])


@dataclass(frozen=True, slots=True)
class _Put:
    """A limits request for a pod of the service `key`; `report` is called with the outcome."""

    key: Key
    request: LimitsRequest
    report: Callable[[PutOutcome], None]


class Dispatcher:
    """The lanes of the control loop's requests to pods."""

    def __init__(
        self,
        engines: Engines,
        replace_pod: ReplacePod,
        record: RecordEvent,
        *,
        metrics: ControlMetrics,
        defects: Defects,
        now: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._replace_pod = replace_pod
        self._record = record
        self._metrics = metrics
        self._defects = defects
        self._now = now
        self._puts = Lane(BATCH, self._send)
        self._retries = Lane(RETRY_BATCH, self._send)
        # Each replacement waits for a pod's answer, and no limits request must.
        self._removals = Lane(1, self._remove)
        self._failed: dict[str, float] = {}

    @property
    def lanes(self) -> tuple[Lane[Any], ...]:
        """All lanes: limits requests, those to pods whose last request failed, and replacements."""
        return self._puts, self._retries, self._removals

    def send(self, key: Key, request: LimitsRequest, report: Callable[[PutOutcome], None]) -> None:
        """Queue limits for a pod of the service `key`; `report` is called with the outcome.

        A newer request to a pod replaces one that is not sent yet.
        """
        self._puts.discard(request.uid)
        self._retries.discard(request.uid)
        lane = self._retries if request.uid in self._failed else self._puts
        lane.put(request.uid, _Put(key, request, report))

    def replace(self, key: Key, pod: PodView, removal: Removal) -> None:
        """Queue the replacement of a pod that confirms the cause; its ReplicaSet creates another."""
        self._removals.put(pod.uid, (key, pod, removal))

    async def run(self) -> None:
        """Carry out what is queued until cancelled.

        Raises:
            ExceptionGroup: with LeaseLost, when this process must not write anymore.
        """
        async with asyncio.TaskGroup() as group:
            for lane, name in zip(self.lanes, ("limits", "retries", "removals"), strict=True):
                group.create_task(lane.run(), name=name)

    async def _send(self, puts: Sequence[_Put]) -> None:
        """Send a batch of limits requests. If the batch fails, send each of them on its own."""
        key = puts[0].key if len(puts) == 1 else None
        with self._defects.contained("send_limits", key) as step:
            outcomes = await self._engines.put_limits([put.request for put in puts])
            self._forget_failures()
            for put, outcome in zip(puts, outcomes, strict=True):
                self._note(put.request, outcome)
                with self._defects.contained("send_limits", put.key):
                    put.report(outcome)
        if step.failed and key is None:
            for put in puts:
                await self._send([put])

    def _note(self, request: LimitsRequest, outcome: PutOutcome) -> None:
        """Count an outcome, and remember a failure; log a pod's first failure only."""
        self._metrics.puts.labels("ok" if outcome.succeeded else "failed").inc()
        if outcome.succeeded:
            self._failed.pop(request.uid, None)
            return
        if request.uid not in self._failed:
            log.warning("limits request failed", pod=outcome.pod, error=outcome.detail)
        self._failed[request.uid] = self._now()

    def _forget_failures(self) -> None:
        oldest = self._now() - FAILURE_KEPT_S
        self._failed = {uid: at for uid, at in self._failed.items() if at > oldest}

    async def _remove(self, removals: Sequence[tuple[Key, PodView, Removal]]) -> None:
        for key, pod, removal in removals:
            with self._defects.contained("replace_pod", key):
                if await self._replace_pod(key, pod, removal):
                    self._record(key, removal.event)
