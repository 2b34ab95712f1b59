"""One scheduler for all services: a plain list now and then, against what events never told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import structlog

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.records import version_of
from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency

log = structlog.get_logger(__name__)

SETTLE_S: Final = 1.0
"""A relist of the event source arrives as many events: one comparison for all of them."""
RETRY_S: Final = 5.0


class ResyncClock(Protocol):
    """The clocks that a resync needs."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""

    def jitter(self, seconds: float) -> float:
        """Somewhat less than `seconds`."""


class Resync:
    """Compares the cache with a plain list of services, and has every service looked at."""

    def __init__(
        self,
        client: KubernetesClient,
        cache: Cache,
        queue: KeyedQueue,
        metrics: OperatorMetrics,
        clock: ResyncClock,
        *,
        namespaces: tuple[str | None, ...],
        period_s: float,
        page_size: int,
        also: Callable[[], Awaitable[None]],
    ) -> None:
        self.period_s = period_s
        self.last_ended: float | None = None
        """When the last one ended, by the monotonic clock."""
        self._client = client
        self._cache = cache
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._namespaces = namespaces
        self._page_size = page_size
        self._also = also
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Asks for a resync soon: the event source has listed anew, and a relist forgets nothing."""
        self._wanted.set()

    async def once(self) -> None:
        """One resync.

        Raises:
            ApiError: a list failed; nothing is dropped on a list that did not finish.
        """
        for namespace in self._namespaces:
            await self._compare(namespace)
        for key in self._cache.services():
            self._queue.add(key, Urgency.RESYNC)
        self.last_ended = self._clock.monotonic()
        self._metrics.last_resync_seconds.set(self._clock.now())

    async def run(self) -> None:
        """Never ends."""
        pause_s = self.period_s
        while True:
            await self._wait(pause_s)
            try:
                await self.once()
                await self._also()
                pause_s = self.period_s
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("resync failed", error=str(problem))
                pause_s = self._clock.jitter(RETRY_S)

    async def _wait(self, pause_s: float) -> None:
        """Until the pause is over or a resync is wanted; then until no more of it is heard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        while self._wanted.is_set():
            self._wanted.clear()
            await asyncio.sleep(SETTLE_S)

    async def _compare(self, namespace: str | None) -> None:
        found: dict[Key, int] = {}
        version = 0
        pages = self._client.list_pages(INFERENCE_SERVICE, namespace, page_size=self._page_size)
        async for page in pages:
            version = version_of(page)
            items = page.get("items") or []
            while items:
                live = items.pop()
                meta = live["metadata"]
                found[Key(meta["namespace"], meta["name"])] = version_of(live)
                self._cache.put_service(live)
        ghosts = self._cache.listed_services(namespace, found, version)
        if ghosts:
            self._metrics.ghosts.inc(len(ghosts))
            log.warning("services were gone unnoticed", services=[str(key) for key in ghosts])
