"""The operator process: everything put together, started in order and ended in order.

Start: credentials, health, the CRD, watches (also of a standby: its cache stays warm), the lease,
then the first write. End: no new looks, looks under way finish, the lease is given back.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.kubernetes.client import (
    KubernetesClient,
    NoCredentials,
    load_configuration,
)
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.lease import LeaderLease, LeaseLost, LeaseTerms
from fleetkeeper.adapters.kubernetes.records import version_of
from fleetkeeper.adapters.kubernetes.reflector import Reflector, all_synced
from fleetkeeper.adapters.kubernetes.resources import WATCHED
from fleetkeeper.adapters.kubernetes.writes import (
    KubernetesWriter,
    Write,
    WriteHook,
    WritePoint,
    no_hook,
)
from fleetkeeper.plan.context import PlanContext
from fleetkeeper.runtime import heap
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.catch_up import observe_service, services_behind
from fleetkeeper.runtime.control_setup import build_control
from fleetkeeper.runtime.controller import Control, Controller
from fleetkeeper.runtime.crd import CrdAbsent, observe_crd_missing
from fleetkeeper.runtime.executor import Executor
from fleetkeeper.runtime.health import HealthServer, Vitals, watch_lag
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.notice_board import NoticeBoard
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.resync import Resync
from fleetkeeper.runtime.settings import Settings

log = structlog.get_logger(__name__)

DRAIN_S: Final = 5.0
"""For looks under way at the end: a write takes 4 s at most."""
START_PAUSE_S: Final = 3.0
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class ServiceWatch(Protocol):
    """How InferenceServices are watched: `fleetkeeper.events.watch_services`."""

    def __call__(
        self,
        sink: ServiceFeed,
        *,
        namespaces: tuple[str, ...],
        kubeconfig: Path | None,
        after_start: Callable[[], None],
    ) -> Coroutine[Any, Any, None]:
        """Watches until cancelled; raises when nothing is watched any more."""


@dataclass(frozen=True, slots=True)
class ServiceFeed:
    """Takes what the service watch sees."""

    cache: Cache
    on_relist: Callable[[], None]

    def changed(self, live: Mapping[str, Any]) -> None:
        """The service is so now."""
        self.cache.put_service(live)

    def deleted(self, live: Mapping[str, Any]) -> None:
        """The service is gone."""
        meta = live["metadata"]
        self.cache.drop_service(
            Key(meta["namespace"], meta["name"]), uid=meta.get("uid", ""), version=version_of(live)
        )

    def relisted(self) -> None:
        """A list was read, which forgets nothing."""
        self.on_relist()


class Operator:
    """One process."""

    def __init__(
        self,
        settings: Settings,
        context: PlanContext,
        client: KubernetesClient,
        *,
        watch: ServiceWatch,
        hook: WriteHook = no_hook,
        control: Control | None = None,
    ) -> None:
        clock = SystemClock()
        self._settings = settings
        self._client = client
        self._clock = clock
        self._watch = watch
        self.metrics = OperatorMetrics()
        self.queue = KeyedQueue(monotonic=clock.monotonic, jitter=clock.jitter)
        self.cache = Cache(now=clock.now, changed=self._changed, stirred=self._stirred)
        self.lease = LeaderLease(
            client,
            LeaseTerms(
                namespace=settings.operator_namespace,
                name=settings.leader.lease_name,
                identity=settings.process_identity,
                duration_s=settings.leader.duration_s,
                renew_deadline_s=settings.leader.renew_deadline_s,
                retry_s=settings.leader.retry_s,
            ),
            clock,
            on_write=self.metrics.writes.labels("update", "Lease").inc,
        )
        writer = KubernetesWriter(
            client,
            fence=self.lease.check if settings.leader.enabled else _no_fence,
            hook=self._counted(hook),
        )
        self._control = (
            build_control(
                settings,
                context,
                cache=self.cache,
                queue=self.queue,
                writer=writer,
                lease=self.lease,
                metrics=self.metrics,
                clock=clock,
            )
            if control is None and settings.control_enabled
            else None
        )
        self.board = NoticeBoard(
            writer, self.metrics, now=clock.now, instance=settings.process_identity
        )
        self.controller = Controller(
            queue=self.queue,
            cache=self.cache,
            client=client,
            executor=Executor(
                client, writer, self.cache, self.metrics, now=clock.now, board=self.board
            ),
            metrics=self.metrics,
            context=context,
            now=clock.now,
            monotonic=clock.monotonic,
            control=control if self._control is None else self._control.loop,
        )
        self._namespaces: tuple[str | None, ...] = settings.namespaces or (None,)
        self.resync = Resync(
            client,
            self.cache,
            self.queue,
            self.metrics,
            clock,
            namespaces=self._namespaces,
            period_s=settings.resync_s,
            page_size=settings.list_page_size,
            also=self._observe_crd,
        )
        self.reflectors = [
            Reflector(client, resource, namespace, self.cache, clock)
            for namespace in self._namespaces
            for resource in WATCHED
        ]
        self.vitals = Vitals(started=clock.monotonic(), resync_period_s=settings.resync_s)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Runs until told to stop.

        Raises:
            BaseException: what ended it otherwise; then the process must end too, with a failure.
        """
        health = HealthServer(
            self.vitals, self.metrics, monotonic=self._clock.monotonic, refresh=self._refresh
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
            await self.lease.release()
            if self._control is not None:
                await self._control.close()
            await health.stop()

    async def _work(self) -> None:
        """Everything that runs; it ends when one part of it fails, or with the queue."""
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(watch_lag(self.vitals, self.metrics, self._clock.monotonic))
            ]
            await self._until_done(self._observe_crd)
            await self._until_done(self.resync.once)
            if behind := services_behind(self.cache):
                helpers += await self._catch_up(behind, group)
            helpers += self._start_watches(group)
            await all_synced(self.reflectors)
            self.vitals.synced = True
            heap.settle()
            log.info("caches complete", services=len(self.cache), records=self.cache.records)
            helpers.append(group.create_task(self.resync.run(), name="resync"))
            helpers += await self._lead(group)
            self._settle()
            if self._control is not None:
                helpers.append(group.create_task(self._control.loop.run(), name="control"))
            telling = group.create_task(self.board.run(self.queue.calm), name="notices")
            await self.controller.run(self._settings.workers)
            telling.cancel()
            await self.board.drain()
            for helper in helpers:
                helper.cancel()

    def _start_watches(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        watch = self._watch(
            ServiceFeed(self.cache, self.resync.want),
            namespaces=self._settings.namespaces,
            kubeconfig=self._settings.kubeconfig,
            after_start=self._take_signals,
        )
        return [
            *(
                group.create_task(reflector.run(), name=f"watch {reflector.resource.plural}")
                for reflector in self.reflectors
            ),
            group.create_task(watch, name="watch inferenceservices"),
        ]

    async def _catch_up(
        self, behind: list[Key], group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Looks at services whose spec changed while nobody led, if this process leads at once."""
        if not self._settings.leader.enabled:
            helpers = await self._lead(group)
        elif await self.lease.acquire_if_free():
            helpers = self._led(group)
        else:
            return []
        for key in behind:
            try:
                await observe_service(self._client, self.cache, key)
            except* ApiError as problems:
                log.warning(
                    "not looked at early", service=str(key), error=str(problems.exceptions[0])
                )
            else:
                await self.controller.look(key)
        return helpers

    def _changed(self, key: Key) -> None:
        """What is read at the start is no news: it is looked at after what changes now."""
        settled = self.controller.settled_since is not None
        self.queue.add(key, Urgency.CHANGED if settled else Urgency.RESYNC)

    def _stirred(self, key: Key) -> None:
        if self.controller.settled_since is None:
            self.queue.add(key, Urgency.RESYNC)
        else:
            self.queue.add_soon(key)

    def _settle(self) -> None:
        """From now on there are looks; first at specs that changed while nobody led."""
        self.controller.settled_since = self._clock.now()
        for key in self.cache.services():
            entry = self.cache.service(key)
            if entry is not None and not entry.is_observed:
                self.queue.add(key)

    async def _lead(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Waits for the lease; the task that keeps it."""
        if not self._settings.leader.enabled:
            self.metrics.leader.set(1)
            return []
        if self.lease.holds:
            return []
        await self.lease.acquire()
        return self._led(group)

    def _led(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        log.info("leading", lease=self._settings.leader.lease_name)
        self.metrics.leader.set(1)
        return [group.create_task(self.lease.keep(), name="lease")]

    async def _end(self, work: asyncio.Task[None]) -> None:
        """No new looks; those under way finish or are cut off."""
        log.info("stopping", looks_under_way=self.queue.working)
        self.queue.close()
        _, late = await asyncio.wait({work}, timeout=DRAIN_S)
        if late:
            work.cancel()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """Tries a step of the start until it succeeds: the CRD or the API server may come later.

        Raises:
            ApiError: 401 or 403: waiting would hide that rights are missing.
        """
        while True:
            try:
                await step()
            except CrdAbsent as problem:
                log.warning("waiting", reason=str(problem))
            except ApiError as problem:
                if problem.status in {401, 403}:
                    raise
                log.warning("waiting", reason=str(problem))
            else:
                return
            await asyncio.sleep(self._clock.jitter(START_PAUSE_S))

    async def _observe_crd(self) -> None:
        missing = await observe_crd_missing(self._client)
        if missing and missing != self.controller.crd_missing:
            log.error("the CRD is older than this operator", missing=list(missing))
        self.controller.crd_missing = missing

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _counted(self, hook: WriteHook) -> WriteHook:
        def count(point: WritePoint, write: Write) -> None:
            if point is WritePoint.BEFORE:
                self.metrics.writes.labels(write.verb, write.kind).inc()
            hook(point, write)

        return count

    def _refresh(self) -> None:
        """Gauges that are read only when somebody scrapes."""
        self.vitals.last_resync = self.resync.last_ended
        self.metrics.queue.labels("ready").set(len(self.queue))
        self.metrics.queue.labels("working").set(self.queue.working)
        self.metrics.queue.labels("waiting").set(self.queue.waiting)
        self.metrics.services.set(len(self.cache))
        self.metrics.records.set(self.cache.records)


async def run_operator(
    settings: Settings,
    context: PlanContext,
    *,
    watch: ServiceWatch,
    hook: WriteHook = no_hook,
    control: Control | None = None,
) -> int:
    """Runs the operator until SIGTERM or a failure; the exit code of the process.

    0 after SIGTERM or SIGINT. 1 when it lost the lease, when a watch ended for good, or at a defect:
    it is to be restarted. 2 when it could never have run: no credentials, or no right to read.
    """
    log.info("starting", settings=settings.shown)
    try:
        client = KubernetesClient(
            await load_configuration(settings.kubeconfig), in_flight=settings.requests_in_flight
        )
    except NoCredentials as problem:
        log.error("no credentials", error=str(problem))  # noqa: TRY400 -- the message says it all
        return EXIT_USAGE
    heap.look_seldom()
    try:
        await Operator(settings, context, client, watch=watch, hook=hook, control=control).run()
    except* LeaseLost as lost:
        log.error("not the leader any more", error=str(lost.exceptions[0]))  # noqa: TRY400 -- expected
        code = EXIT_FAILED
    except* ApiError as refused:
        log.error("cannot run", error=str(refused.exceptions[0]))  # noqa: TRY400 -- no defect of ours
        code = EXIT_USAGE
    except* Exception:
        log.exception("the operator failed")
        code = EXIT_FAILED
    else:
        code = EXIT_OK
    finally:
        await client.close()
    log.info("stopped", code=code)
    return code


def _no_fence() -> None:
    """A lone process without leader election may always write."""
