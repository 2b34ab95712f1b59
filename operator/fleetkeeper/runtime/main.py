"""The operator process: construction, start-up and shutdown.

Start-up: credentials, health, the CRD, watches (also in a standby, whose cache stays warm), the lease,
then the first write. Shutdown: no new reconciles, those in progress finish, the lease is released.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from fleetkeeper.adapters.clock import ClockApart, SystemClock
from fleetkeeper.adapters.kubernetes.client import (
    KubernetesClient,
    NoCredentials,
    load_configuration,
)
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.lease import LeaderLease, LeaseLost, LeaseTerms
from fleetkeeper.adapters.kubernetes.reading import Unreadable, text
from fleetkeeper.adapters.kubernetes.records import place_of
from fleetkeeper.adapters.kubernetes.reflector import Reflector, all_synced
from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE, WATCHED
from fleetkeeper.adapters.kubernetes.writes import (
    KubernetesWriter,
    Write,
    WriteHook,
    WritePoint,
    no_hook,
)
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime import heap
from fleetkeeper.runtime.autoscaler.setup import build_control
from fleetkeeper.runtime.catch_up import observe_service, services_behind
from fleetkeeper.runtime.controller import Control, Controller
from fleetkeeper.runtime.crd import CrdAbsent, observe_crd_missing
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.executor import Executor
from fleetkeeper.runtime.health import HealthServer, Vitals, watch_lag
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.namespaces import NamespaceReads, watch_each
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.releases import NamespacesTaken, refuse_taken
from fleetkeeper.runtime.resync import Resync
from fleetkeeper.runtime.settings import Settings
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger

log = structlog.get_logger(__name__)

DRAIN_S: Final = 5.0
"""Time for reconciles in progress at shutdown: a write takes 4 s at most."""
CANCEL_S: Final = 2.0
"""Time for cancelled tasks to end: they only close connections."""
START_PAUSE_S: Final = 3.0
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class ServiceWatch(Protocol):
    """The watch of InferenceServices: `fleetkeeper.events.watch_services`."""

    def __call__(
        self,
        sink: ServiceFeed,
        *,
        namespaces: tuple[str, ...],
        kubeconfig: Path | None,
        after_start: Callable[[], None],
    ) -> Coroutine[Any, Any, None]:
        """Watch until cancelled; raise if the watch ends."""


@dataclass(frozen=True, slots=True)
class ServiceFeed:
    """The sink of the service watch."""

    cache: Cache
    defects: Defects
    on_relist: Callable[[], None]

    def changed(self, live: Mapping[str, Any]) -> None:
        """Store an added or modified service."""
        with self.defects.contained("service_event", _key_of(live)):
            self.cache.put_service(live)

    def deleted(self, live: Mapping[str, Any]) -> None:
        """Remove a deleted service."""
        try:
            place = place_of(INFERENCE_SERVICE.kind, live)
        except Unreadable as problem:
            log.warning("deleted service has no readable name: resync queued", why=str(problem))
            self.on_relist()
            return
        key = Key(place.namespace, place.name)
        with self.defects.contained("service_event", key):
            uid = text(live["metadata"].get("uid"))
            self.cache.drop_service(key, uid=uid, version=place.version)

    def relisted(self) -> None:
        """Handle a finished list, which does not show what was deleted."""
        self.on_relist()


class Operator:
    """The parts of one operator process."""

    def __init__(
        self,
        settings: Settings,
        context: PlanContext,
        client: KubernetesClient,
        *,
        lease_client: KubernetesClient,
        watch: ServiceWatch,
        hook: WriteHook = no_hook,
        control: Control | None = None,
    ) -> None:
        clock = SystemClock()
        client.on_date = clock.observe_date
        self._settings = settings
        self._client = client
        self._clock = clock
        self._watch = watch
        self.metrics = OperatorMetrics()
        self.queue = KeyedQueue(monotonic=clock.monotonic, jitter=clock.jitter)
        self.cache = Cache(
            now=clock.now, changed=self._changed, on_status_change=self._status_changed
        )
        self.defects = Defects(
            self.metrics.defects, monotonic=clock.monotonic, changed=self.queue.add
        )
        ledger = GpuLedger(self.cache, context.gpu_budget)
        self.lease = LeaderLease(
            lease_client,
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
        self._writer = writer = KubernetesWriter(
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
                defects=self.defects,
                clock=clock,
                ledger=ledger,
            )
            if control is None and settings.control_enabled
            else None
        )
        self.board = EventRecorder(
            writer,
            self.metrics,
            now=clock.now,
            instance=settings.process_identity,
            defects=self.defects,
        )
        self.controller = Controller(
            queue=self.queue,
            cache=self.cache,
            client=client,
            executor=Executor(
                client, writer, self.cache, self.metrics, now=clock.now, board=self.board
            ),
            metrics=self.metrics,
            defects=self.defects,
            context=context,
            now=clock.now,
            monotonic=clock.monotonic,
            control=control if self._control is None else self._control.loop,
            ledger=ledger,
        )
        # What the GPU budget leaves is unknown until all services are known.
        self._is_budgeted = context.gpu_budget.is_bounded
        self._namespaces: tuple[str | None, ...] = settings.namespaces or (None,)
        self.reads = NamespaceReads(
            settings.namespaces, self.cache, self.metrics, recovered=self._recovered
        )
        self.resync = Resync(
            client,
            self.cache,
            self.queue,
            self.metrics,
            clock,
            defects=self.defects,
            namespaces=self._namespaces,
            reads=self.reads,
            period_s=settings.resync_s,
            page_size=settings.list_page_size,
            also=self._observe_crd,
        )
        self.reflectors = [
            Reflector(
                client,
                resource,
                namespace,
                self.cache,
                clock,
                report=self.reads.report_of(namespace, resource.plural),
            )
            for namespace in self._namespaces
            for resource in WATCHED
        ]
        self.vitals = Vitals(started=clock.monotonic(), resync_period_s=settings.resync_s)
        self.taken: NamespacesTaken | None = None
        """Set if `run` ended because an older release serves namespaces of this one."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            BaseException: the error that ended it. The process must then end too, with a failure.
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
            await self.lease.release(after=partial(self._no_more_writes, work))
            if self._control is not None:
                await self._control.close()
            await health.stop()

    async def _work(self) -> None:
        """Run all tasks. End when one of them fails or the queue is closed."""
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(watch_lag(self.vitals, self.metrics, self._clock.monotonic)),
                group.create_task(self._clock.keep(), name="clock"),
            ]
            await self._until_done(self._observe_crd)
            if self._settings.refuse_second_release:
                await self._until_done(self._observe_releases)
            if self.taken is not None:
                for helper in helpers:
                    helper.cancel()
                return
            if self._clock.machine_off_s:
                off_s = round(self._clock.machine_off_s)
                log.warning("the node's clock is wrong", off_s=off_s, used="the API server's clock")
            await self._until_done(self.resync.once)
            if not self._is_budgeted and (behind := services_behind(self.cache)):
                helpers += await self._catch_up(behind, group)
            helpers += self._start_watches(group)
            await all_synced(self.reflectors)
            await self.reads.wait_for_one()
            self.vitals.synced = True
            heap.settle()
            log.info("caches synced", services=len(self.cache), records=self.cache.records)
            helpers.append(group.create_task(self.resync.run(), name="resync"))
            helpers.append(group.create_task(self.resync.retry_denied(), name="denied namespaces"))
            helpers += await self._lead(group)
            self._settle()
            if self._control is not None:
                helpers.append(group.create_task(self._control.loop.run(), name="control"))
            telling = group.create_task(self.board.run(self.queue.idle), name="notices")
            await self.controller.run(self._settings.workers)
            telling.cancel()
            await self.board.drain()
            if self._control is not None:
                await self._control.loop.drain()
            for helper in helpers:
                helper.cancel()

    def _start_watches(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        def watch(namespaces: tuple[str, ...]) -> Coroutine[Any, Any, None]:
            return self._watch(
                ServiceFeed(self.cache, self.defects, self.resync.want),
                namespaces=namespaces,
                kubeconfig=self._settings.kubeconfig,
                after_start=self._take_signals,
            )

        watches = watch_each(self._settings.namespaces, watch, self.reads, self._clock.jitter)
        return [
            *(
                group.create_task(reflector.run(), name=f"watch {reflector.resource.plural}")
                for reflector in self.reflectors
            ),
            group.create_task(watches, name="watch inferenceservices"),
        ]

    async def _catch_up(
        self, behind: list[Key], group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Reconcile services whose spec changed without a leader, if the lease is free now."""
        if not self._settings.leader.enabled:
            helpers = await self._lead(group)
        elif await self.lease.acquire_if_free():
            helpers = self._led(group)
        else:
            return []
        for key in behind:
            with self.defects.contained("catch_up", key):
                await self._reconcile_early(key)
        return helpers

    async def _reconcile_early(self, key: Key) -> None:
        try:
            await observe_service(self._client, self.cache, key)
        except* ApiError as problems:
            log.warning(
                "early reconcile skipped", service=str(key), error=str(problems.exceptions[0])
            )
        else:
            await self.controller.reconcile(key)

    def _changed(self, key: Key) -> None:
        """Queue a service; those read at start-up come after those that change now."""
        settled = self.controller.settled_since is not None
        self.queue.add(key, Urgency.CHANGED if settled else Urgency.RESYNC)

    def _status_changed(self, key: Key) -> None:
        if self.controller.settled_since is None:
            self.queue.add(key, Urgency.RESYNC)
        else:
            self.queue.add_soon(key)

    def _settle(self) -> None:
        """Start reconciles, with the services first whose spec changed without a leader."""
        self.controller.settled_since = self._clock.now()
        for key in self.cache.services():
            entry = self.cache.service(key)
            if entry is not None and not entry.is_observed:
                self.queue.add(key)

    async def _lead(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Wait for the lease; return the task that renews it."""
        if not self._settings.leader.enabled:
            self.metrics.leader.set(1)
            return []
        if self.lease.holds:
            return []
        await self.lease.acquire()
        return self._led(group)

    def _led(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        log.info("became leader", lease=self._settings.leader.lease_name)
        self.metrics.leader.set(1)
        return [group.create_task(self.lease.keep(), name="lease")]

    async def _no_more_writes(self, work: asyncio.Task[None]) -> None:
        """Wait until cancelled tasks have ended and none of their writes can still be applied."""
        await asyncio.wait({work}, timeout=CANCEL_S)
        await self._writer.settled()

    async def _end(self, work: asyncio.Task[None]) -> None:
        """Stop new reconciles; let those in progress finish, or cancel them after `DRAIN_S`."""
        log.info("stopping", looks_under_way=self.queue.working)
        self.queue.close()
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

    def _recovered(self) -> None:
        """Queue a resync for a namespace that can be read again: only a list shows deletions."""
        self.resync.want()

    async def _observe_releases(self) -> None:
        try:
            await refuse_taken(self._client, self._settings.release, self._settings.namespaces)
        except NamespacesTaken as problem:
            self.taken = problem

    async def _observe_crd(self) -> None:
        missing = await observe_crd_missing(self._client)
        if missing and missing != self.controller.crd_missing:
            log.error("CRD is older than this operator", missing=list(missing))
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
        """Update the gauges that are only needed at a scrape."""
        self.vitals.last_resync = self.resync.last_ended
        self.metrics.queue.labels("ready").set(len(self.queue))
        self.metrics.queue.labels("working").set(self.queue.working)
        self.metrics.queue.labels("waiting").set(self.queue.waiting)
        self.metrics.services.set(len(self.cache))
        self.metrics.records.set(self.cache.records)
        self.metrics.unreadable.clear()
        for kind, count in self.cache.unreadable_counts().items():
            self.metrics.unreadable.labels(kind).set(count)


async def run_operator(
    settings: Settings,
    context: PlanContext,
    *,
    watch: ServiceWatch,
    hook: WriteHook = no_hook,
    control: Control | None = None,
) -> int:
    """Run the operator until SIGTERM or a failure; return the exit code of the process.

    0 after SIGTERM or SIGINT. 1 if it lost the lease, a watch ended for good, or a defect occurred:
    it must be restarted. 2 if it cannot run at all: no credentials, no right to read, or an older
    release serves all its namespaces.
    """
    log.info("starting", settings=settings.shown)
    try:
        configuration = await load_configuration(settings.kubeconfig)
    except NoCredentials as problem:
        log.error("no credentials", error=str(problem))  # noqa: TRY400 -- the message says it all
        return EXIT_USAGE
    client = KubernetesClient(configuration, in_flight=settings.requests_in_flight)
    lease_client = KubernetesClient(configuration, retries_429=0)
    heap.reduce_frequency()

    def build(settings: Settings) -> Operator:
        return Operator(
            settings,
            context,
            client,
            lease_client=lease_client,
            watch=watch,
            hook=hook,
            control=control,
        )

    try:
        code = await _run_where_free(settings, build)
    except* LeaseLost as lost:
        log.error("leader lease lost", error=str(_first_of(lost)))  # noqa: TRY400 -- expected
        code = EXIT_FAILED
    except* ClockApart as set_clock:
        log.error("restart required", error=str(set_clock.exceptions[0]))  # noqa: TRY400 -- not a defect
        code = EXIT_FAILED
    except* ApiError as refused:
        log.error("operator cannot run", error=str(_first_of(refused)))  # noqa: TRY400 -- not a defect
        code = EXIT_USAGE
    except* Exception:
        log.exception("operator failed")
        code = EXIT_FAILED
    finally:
        await client.close()
        await lease_client.close()
    log.info("stopped", code=code)
    return code


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is not a group, at any depth."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _run_where_free(settings: Settings, build: Callable[[Settings], Operator]) -> int:
    """Run the operator, if needed again without namespaces of older releases; return the exit code.

    Each namespace is refused on its own, because anyone with write access to it could forge a marker.
    """
    while True:
        operator = build(settings)
        await operator.run()
        if operator.taken is None:
            return EXIT_OK
        log.error("namespaces refused", error=str(operator.taken))
        free = tuple(n for n in settings.namespaces if n not in operator.taken.by_namespace)
        if not free:
            return EXIT_USAGE
        settings = settings.model_copy(update={"namespaces": free})


def _key_of(live: Mapping[str, Any]) -> Key:
    meta = live.get("metadata") or {}
    return Key(str(meta.get("namespace", "")), str(meta.get("name", "")))


def _no_fence() -> None:
    """Allow every write: without leader election this is the only process."""
