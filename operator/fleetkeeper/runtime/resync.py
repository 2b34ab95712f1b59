"""Periodic resync: a plain list of all services finds what the watch missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import structlog

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.namespaces import NamespaceReads
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import Unreadable, maps, place_of, version_of

log = structlog.get_logger(__name__)

SETTLE_S: Final = 1.0
"""A relist of the event source arrives as many events: one resync covers all of them."""
RETRY_S: Final = 5.0
DENIED_RETRY_S: Final = 20.0
"""Time between two reads of a denied namespace: somebody must restore the rights."""


class ResyncClock(Protocol):
    """The clocks that a resync needs."""

    def now(self) -> float:
        """Return the seconds since the epoch."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""

    def jitter(self, seconds: float) -> float:
        """Return somewhat less than `seconds`."""


class Resync:
    """The resync: it compares the cache with a plain list of services and requeues every service."""

    def __init__(
        self,
        client: KubernetesClient,
        cache: Cache,
        queue: KeyedQueue,
        metrics: OperatorMetrics,
        clock: ResyncClock,
        *,
        defects: Defects,
        namespaces: tuple[str | None, ...],
        reads: NamespaceReads,
        period_s: float,
        page_size: int,
        also: Callable[[], Awaitable[None]],
    ) -> None:
        self.period_s = period_s
        self.last_ended: float | None = None
        """When the last resync succeeded or failed, by the monotonic clock."""
        self._client = client
        self._cache = cache
        self._queue = queue
        self._metrics = metrics
        self._defects = defects
        self._clock = clock
        self._namespaces = namespaces
        self._reads = reads
        self._denied: set[str | None] = set()
        self._is_complete = True
        self._page_size = page_size
        self._also = also
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Request a resync soon: the event source relisted, which does not show what was deleted."""
        self._wanted.set()

    async def once(self) -> None:
        """Run one resync. Nothing is removed because of a list that did not finish.

        Raises:
            ApiError: no namespace could be read.
        """
        problems = [await self._read(namespace) for namespace in self._namespaces]
        passing = [problem for problem in problems if problem and not problem.is_denial]
        self._is_complete = not passing
        if all(problems):
            raise next(problem for problem in (*passing, *problems) if problem)
        for key in self._cache.services():
            self._queue.add(key, Urgency.RESYNC)
        self.last_ended = self._clock.monotonic()
        self._metrics.last_resync_seconds.set(self._clock.now())

    async def run(self) -> None:
        """Resync periodically and on request; never return."""
        pause_s = self.period_s
        while True:
            await self._wait(pause_s)
            try:
                await self.once()
                await self._also()
                pause_s = self.period_s if self._is_complete else self._clock.jitter(RETRY_S)
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("resync failed", error=str(problem))
                pause_s = self._clock.jitter(RETRY_S)
                self.last_ended = self._clock.monotonic()

    async def retry_denied(self) -> None:
        """Retry the namespaces whose reads are denied; never return."""
        while True:
            await asyncio.sleep(self._clock.jitter(DENIED_RETRY_S))
            for namespace in tuple(self._denied):
                await self._read(namespace)

    async def _wait(self, pause_s: float) -> None:
        """Wait until the pause is over or a resync is requested, then until requests stop coming."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        while self._wanted.is_set():
            self._wanted.clear()
            await asyncio.sleep(SETTLE_S)

    async def _read(self, namespace: str | None) -> ApiError | None:
        """Compare one namespace; return why it could not be read, if others are unaffected.

        Raises:
            ApiError: it could not be read, and is all that is served.
        """
        report = self._reads.report_of(namespace, INFERENCE_SERVICE.plural)
        try:
            await self._compare(namespace)
        except ApiError as problem:
            if report is None:
                raise
            self._metrics.errors.labels(problem.reason).inc()
            if problem.is_denial:
                self._denied.add(namespace)
                report(problem)
            else:
                log.warning("list of services failed", namespace=namespace, error=str(problem))
            return problem
        self._denied.discard(namespace)
        if report is not None:
            report(None)
        return None

    async def _compare(self, namespace: str | None) -> None:
        found: set[Key] = set()
        version, is_whole = 0, True
        pages = self._client.list_pages(INFERENCE_SERVICE, namespace, page_size=self._page_size)
        async for page in pages:
            version = version_of(page)
            items = maps(page.get("items"))
            while items:
                live = items.pop()
                try:
                    place = place_of(INFERENCE_SERVICE.kind, live)
                except Unreadable as problem:
                    log.warning("service skipped: no readable name or namespace", why=str(problem))
                    is_whole = False
                    continue
                key = Key(place.namespace, place.name)
                found.add(key)
                with self._defects.contained("resync", key):
                    self._cache.put_service(live)
        ghosts = self._cache.listed_services(namespace, found, version) if is_whole else []
        if ghosts:
            self._metrics.ghosts.inc(len(ghosts))
            log.warning(
                "removed services missed by the watch", services=[str(key) for key in ghosts]
            )
