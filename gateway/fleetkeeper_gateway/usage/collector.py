"""Reads the ledgers of all engines, independently of one another."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import aiohttp
import structlog

from fleetkeeper_gateway.grants.keys import NoGrantKeyError
from fleetkeeper_gateway.interfaces import Limiter
from fleetkeeper_gateway.usage import metrics
from fleetkeeper_gateway.usage.engines import (
    Engines,
    TokenSigner,
    UnreadableError,
    open_engines,
)
from fleetkeeper_gateway.usage.lane import Lane
from fleetkeeper_gateway.usage.pages import Entry, Page
from fleetkeeper_gateway.usage.pods import Target
from fleetkeeper_gateway.usage.settler import Settler
from fleetkeeper_gateway.usage.store import UsageStore

log = structlog.get_logger(__name__)

TRUSTED_TURNS: Final = 32
"""Pages that are read concurrently from engines whose last reading succeeded."""
TRUSTED_S: Final = 2.0
DOUBTED_TURNS: Final = 16
"""Pages that are read concurrently from all other engines."""
DOUBTED_S: Final = 10.0
MAX_PAGES: Final = 20
"""Maximum pages of one reading, enough for a whole ledger. The next reading continues there."""
LAST_PERIOD_S: Final = 0.5
"""Period of terminating pods, whose ledgers end with them."""
LAST_READS: Final = 1_200
SPARING_PERIOD_S: Final = 60.0
"""Period of the pods of a namespace that has reached its maximum of lines in this hour."""
TIDY_S: Final = 300.0
SERIES_S: Final = 3_600.0
"""Time for which a service keeps its series after its last pod."""
_EXPECTED: Final = (UnreadableError, aiohttp.ClientError, OSError, NoGrantKeyError)
"""Errors of a failed reading. TimeoutError is an OSError."""


class Checker(Protocol):
    """Checks whether the gateway sent an attempt, or the engine made it up."""

    def is_ours(self, attempt: str, service: str, request: str, key: str, tier: str) -> bool:
        """Return whether the gateway sent this attempt of this request to this service."""


@dataclass(eq=False, slots=True)
class _Pod:
    """An engine that is read."""

    target: Target
    asked: float = 0.0
    """Monotonic time of the last attempt to read a page."""
    is_trusted: bool = False
    """True if the last reading succeeded. Other engines wait in a lane of their own."""
    is_gone: bool = False
    last_reads: int = 0
    """Readings since the pod terminates."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Collector:
    """The reader of all engines. Without a limiter (None), nothing is settled.

    Each pod has a task and a period of its own. A wrong or missing answer of an engine ends this one
    reading only.
    """

    def __init__(
        self,
        store: UsageStore,
        signer: TokenSigner,
        checker: Checker,
        limiter: Limiter | None,
        *,
        period_s: float,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._signer = signer
        self._checker = checker
        self._settler = Settler(limiter)
        self._period_s = period_s
        self._wall = wall
        self._monotonic = monotonic
        self._trusted = Lane(TRUSTED_TURNS)
        self._doubted = Lane(DOUBTED_TURNS)
        self._pods: dict[str, _Pod] = {}
        self._new: asyncio.Queue[_Pod] = asyncio.Queue()
        self._problems: dict[str, str] = {}
        self._not_counting: set[str] = set()
        self._services: dict[str, float] = {}
        """Services with series, and when a pod of each was last read."""

    def follow(self, target: Target) -> None:
        """Start to read an engine, or take its changes."""
        pod = self._pods.get(target.pod.uid)
        if pod is None:
            pod = self._pods[target.pod.uid] = _Pod(target, self._monotonic())
            self._new.put_nowait(pod)
            metrics.PODS.set(len(self._pods))
        elif target.terminating and not pod.target.terminating:
            pod.changed.set()
        pod.target, pod.is_gone = target, False

    def leave(self, uid: str) -> None:
        """Stop reading an engine. A terminating engine is read until it does not answer."""
        pod = self._pods.get(uid)
        if pod is not None:
            pod.is_gone = True
            pod.changed.set()

    def read_age_s(self) -> float:
        """Return the maximum time since the last reading, of responding engines; NaN without such engines."""
        now = self._monotonic()
        ages = (now - pod.asked for pod in self._pods.values() if pod.is_trusted)
        return max(ages, default=math.nan)

    async def run(self) -> None:
        """Read until cancelled."""
        async with open_engines(self._signer) as engines, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sync_regularly())
            tasks.create_task(self._tidy_regularly())
            tasks.create_task(self._settler.run())
            while True:
                tasks.create_task(self._follow(engines, await self._new.get()))

    async def _follow(self, engines: Engines, pod: _Pod) -> None:
        while not self._is_over(pod):
            await self._read(engines, pod)
            if not self._is_over(pod):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(pod)):
                        await pod.changed.wait()
                pod.changed.clear()
        self._forget(pod)

    def _is_over(self, pod: _Pod) -> bool:
        return pod.is_gone and not (pod.is_trusted and self._is_ending(pod))

    def _is_ending(self, pod: _Pod) -> bool:
        return pod.target.terminating and pod.last_reads < LAST_READS

    def _pause_s(self, pod: _Pod) -> float:
        if self._store.is_used_up(pod.target.pod.namespace):
            return max(SPARING_PERIOD_S, self._period_s)
        if pod.is_trusted and self._is_ending(pod):
            return min(LAST_PERIOD_S, self._period_s)
        return self._period_s

    async def _read(self, engines: Engines, pod: _Pod) -> None:
        """Read an engine's ledger to its end."""
        lane, time_s = self._doubted, DOUBTED_S
        if pod.is_trusted:
            lane, time_s = self._trusted, TRUSTED_S
        pod.last_reads += pod.target.terminating
        try:
            for _ in range(MAX_PAGES):
                async with lane.turn(pod.target.pod.namespace), asyncio.timeout(time_s):
                    has_more = await self._read_page(engines, pod.target)
                pod.asked = self._monotonic()
                if not has_more:
                    break
        except _EXPECTED as problem:
            self._note_failure(pod, problem)
        except Exception as problem:
            # An error that one engine provokes must not keep this process from the others.
            if self._note_failure(pod, problem):
                log.exception("usage cannot be read: a defect", pod=pod.target.name)
        else:
            self._note_success(pod)

    async def _read_page(self, engines: Engines, target: Target) -> bool:
        """Read the next page. Return whether there is another."""
        uid = target.pod.uid
        self._services[target.service] = self._monotonic()
        cursor = self._store.cursor(uid)
        page = self._with_own_attempts(await engines.page(target, cursor), target)
        try:
            reading = self._store.append(page, target.pod, self._wall())
        except OSError:
            metrics.WRITE_FAILURES.inc()
            raise
        metrics.count(target.service, reading)
        self._settler.add(reading.attributed)
        if page.counting and not page.errors:
            self._not_counting.discard(uid)
        else:
            self._not_counting.add(uid)
        metrics.NOT_COUNTING.set(len(self._not_counting))
        return reading.cursor.next < page.newest and reading.cursor.next > cursor.next

    def _with_own_attempts(self, page: Page, target: Target) -> Page:
        """Return the page with attempts that the gateway did not make as unattributed."""
        entries = tuple(
            entry if self._is_own(entry, target.service) else entry.without_grant()
            for entry in page.entries
        )
        claimed = sum(entry.attempt is not None for entry in page.entries)
        forged = claimed - sum(entry.attempt is not None for entry in entries)
        if not forged:
            return page
        metrics.FORGED.labels(target.service).inc(forged)
        log.warning(
            "an engine reports requests that the gateway did not send to it",
            pod=target.name,
            namespace=target.pod.namespace,
            entries=forged,
        )
        return page.model_copy(update={"entries": entries})

    def _is_own(self, entry: Entry, service: str) -> bool:
        if entry.attempt is None or entry.key is None:
            return True
        return self._checker.is_ours(
            entry.attempt, service, entry.request or "", entry.key, entry.tier or ""
        )

    def _forget(self, pod: _Pod) -> None:
        uid = pod.target.pod.uid
        del self._pods[uid]
        self._problems.pop(uid, None)
        self._not_counting.discard(uid)
        metrics.PODS.set(len(self._pods))
        metrics.UNREACHABLE.set(len(self._problems))
        metrics.NOT_COUNTING.set(len(self._not_counting))

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await asyncio.to_thread(self._store.sync)
            except OSError as problem:
                metrics.WRITE_FAILURES.inc()
                log.error("usage files were not synced", error=str(problem))  # noqa: TRY400 - no defect

    async def _tidy_regularly(self) -> None:
        while True:
            self._forget_services()
            try:
                await asyncio.to_thread(self._store.tidy, self._wall())
            except (OSError, ValueError) as problem:
                metrics.WRITE_FAILURES.inc()
                log.error("usage files were not tidied", error=str(problem))  # noqa: TRY400 - no defect
            await asyncio.sleep(TIDY_S)

    def _forget_services(self) -> None:
        """Remove the series of services that have had no pod for a while."""
        now = self._monotonic()
        self._services |= dict.fromkeys((pod.target.service for pod in self._pods.values()), now)
        for service in [name for name, at in self._services.items() if now - at > SERIES_S]:
            del self._services[service]
            metrics.forget(service)

    def _note_success(self, pod: _Pod) -> None:
        pod.is_trusted = True
        if self._problems.pop(pod.target.pod.uid, None) is not None:
            metrics.UNREACHABLE.set(len(self._problems))
            log.info("usage is read again", pod=pod.target.name, namespace=pod.target.pod.namespace)

    def _note_failure(self, pod: _Pod, problem: Exception) -> bool:
        """Count a failure each time, and log it once. Return whether it is new."""
        pod.asked, pod.is_trusted = self._monotonic(), False
        metrics.FAILED_READINGS.labels(pod.target.service).inc()
        text = f"{type(problem).__name__}: {problem}"[:300]
        uid = pod.target.pod.uid
        is_new = self._problems.get(uid) != text
        if is_new and not pod.target.terminating:
            log.warning(
                "usage cannot be read",
                pod=pod.target.name,
                namespace=pod.target.pod.namespace,
                error=text,
            )
        self._problems[uid] = text
        metrics.UNREACHABLE.set(len(self._problems))
        return is_new
