"""The life of the operator process.

Start-up: health, the CRD, watches (also in a standby, whose cache stays warm), the lease, then the
first write. Shutdown: no new reconciles, those in progress finish, the lease is released.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.reflector import all_settled
from fleetkeeper.runtime import heap
from fleetkeeper.runtime.crd import CrdAbsent
from fleetkeeper.runtime.namespaces import watch_each
from fleetkeeper.runtime.parts import Parts
from fleetkeeper.runtime.releases import NamespacesTaken, refuse_taken
from fleetkeeper.runtime.service_feed import ServiceFeed, ServiceWatch
from fleetkeeper.runtime.telemetry.health import HealthServer, Vitals, watch_lag
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)

DRAIN_S: Final = 5.0
"""Time for reconciles in progress at shutdown: a write takes 4 s at most."""
CANCEL_S: Final = 2.0
"""Time for cancelled tasks to end: they only close connections."""
START_PAUSE_S: Final = 3.0


class Operator:
    """One operator process."""

    def __init__(self, parts: Parts, watch: ServiceWatch) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._watch = watch
        self._vitals = Vitals(
            started=parts.clock.monotonic(), resync_period_s=parts.settings.resync_s
        )
        self.taken: NamespacesTaken | None = None
        """Set if `run` ended because an older release serves namespaces of this one."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            BaseException: the error that ended it. The process must then end too, with a failure.
        """
        health = HealthServer(
            self._vitals, self._metrics, monotonic=self._clock.monotonic, refresh=self._refresh
        )
        port = await health.start(self._settings.listen_address, self._settings.listen_port)
        log.info("listening", address=self._settings.listen_address, port=port)
        self._take_signals()
        work = asyncio.create_task(self._work(), name="operator")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._end(work)
            elif (problem := work.exception()) is not None:
                raise problem
        finally:
            work.cancel()
            stop.cancel()
            await self._parts.lease.release(after=partial(self._no_more_writes, work))
            if self._parts.control is not None:
                await self._parts.control.close()
            await health.stop()

    async def _work(self) -> None:
        """Run all tasks. End when one of them fails or the queue is closed."""
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(watch_lag(self._vitals, self._metrics, self._clock.monotonic)),
                group.create_task(self._clock.keep(), name="clock"),
            ]
            await self._until_done(parts.crd.observe)
            if self._settings.refuse_second_release:
                await self._until_done(self._observe_releases)
            if self.taken is not None:
                for helper in helpers:
                    helper.cancel()
                return
            if self._clock.machine_off_s:
                off_s = round(self._clock.machine_off_s)
                log.warning("the node's clock is wrong", off_s=off_s, used="the API server's clock")
            await self._until_done(parts.resync.once)
            helpers += self._start_watches(group)
            await all_settled(parts.reflectors)
            await parts.reads.wait_for_one()
            self._vitals.synced = True
            heap.settle()
            log.info("caches synced", services=len(parts.cache), records=parts.cache.records)
            helpers.append(group.create_task(parts.resync.run(), name="resync"))
            helpers.append(group.create_task(parts.resync.retry_denied(), name="denied namespaces"))
            helpers.append(group.create_task(parts.grant_keys.keep(), name="grant keys"))
            if self._settings.leader.enabled:
                await parts.lease.acquire()
                log.info("became leader", lease=self._settings.leader.lease_name)
                helpers.append(group.create_task(parts.lease.keep(), name="lease"))
            if parts.wake_marks is not None:
                helpers.append(group.create_task(parts.wake_marks.keep(), name="wake marks"))
            self._metrics.leader.set(1)
            self._settle()
            if parts.control is not None:
                helpers.append(group.create_task(parts.control.loop.run(), name="control"))
            posting = group.create_task(parts.recorder.run(parts.queue.idle), name="events")
            await parts.controller.run(self._settings.workers)
            posting.cancel()
            if parts.control is not None:
                parts.control.loop.flush_events()
            await parts.recorder.drain()
            for helper in helpers:
                helper.cancel()

    def _start_watches(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        def watch(namespaces: tuple[str, ...]) -> Coroutine[Any, Any, None]:
            return self._watch(
                ServiceFeed(self._parts.cache, self._parts.defects, self._parts.resync.want),
                namespaces=namespaces,
                kubeconfig=self._settings.kubeconfig,
                after_start=self._take_signals,
            )

        watches = watch_each(
            self._settings.namespaces, watch, self._parts.reads, self._clock.jitter
        )
        return [
            *(
                group.create_task(reflector.run(), name=f"watch {reflector.resource.plural}")
                for reflector in self._parts.reflectors
            ),
            group.create_task(watches, name="watch inferenceservices"),
        ]

    def _settle(self) -> None:
        """Start reconciles, with the services first whose spec changed without a leader."""
        self._parts.controller.settled_since = self._clock.now()
        for key in self._parts.cache.services():
            entry = self._parts.cache.service(key)
            if entry is not None and not entry.is_observed:
                self._parts.queue.add(key)

    async def _no_more_writes(self, work: asyncio.Task[None]) -> None:
        """Wait until cancelled tasks have ended and none of their writes can still be applied."""
        await asyncio.wait({work}, timeout=CANCEL_S)
        await self._parts.writer.settled()

    async def _end(self, work: asyncio.Task[None]) -> None:
        """Stop new reconciles; let those in progress finish, or cancel them after `DRAIN_S`."""
        log.info("stopping", reconciles=self._parts.queue.working)
        self._parts.queue.close()
        _, late = await asyncio.wait({work}, timeout=DRAIN_S)
        if late:
            work.cancel()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """Retry a start-up step until it succeeds: the CRD or the API server may come later.

        Raises:
            ApiError: 401 or 403: waiting would hide that rights are missing.
        """
        while True:
            try:
                await step()
            except CrdAbsent as problem:
                log.warning("start-up waiting", reason=str(problem))
            except ApiError as problem:
                if problem.is_denial:
                    raise
                log.warning("start-up waiting", reason=str(problem))
            else:
                return
            await asyncio.sleep(self._clock.jitter(START_PAUSE_S))

    async def _observe_releases(self) -> None:
        try:
            await refuse_taken(
                self._parts.client, self._settings.release, self._settings.namespaces
            )
        except NamespacesTaken as problem:
            self.taken = problem

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _refresh(self) -> None:
        """Update the gauges that are only needed at a scrape."""
        parts, metrics = self._parts, self._metrics
        self._vitals.last_resync = parts.resync.last_ended
        metrics.queue.labels("ready").set(len(parts.queue))
        metrics.queue.labels("working").set(parts.queue.working)
        metrics.queue.labels("waiting").set(parts.queue.waiting)
        metrics.services.set(len(parts.cache))
        metrics.records.set(parts.cache.records)
        metrics.unreadable.clear()
        for kind, count in parts.cache.unreadable_counts().items():
            metrics.unreadable.labels(kind).set(count)
