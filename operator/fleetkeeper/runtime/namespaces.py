"""Isolation of served namespaces that cannot be read.

Decisions on a namespace that was deleted, or whose RoleBinding is gone, are suspended: its records
stay in the cache, but its services are neither reconciled nor controlled, because a decision would
rest on incomplete records. All reads of the namespace are retried. Once all of them have succeeded,
each of its services is reconciled.

None of this applies if the operator serves the whole cluster or one namespace: there, a refusal ends
the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import structlog

from fleetkeeper.adapters.kubernetes.reflector import Report
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)

FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""Time between two attempts to watch the services of a namespace."""


class NamespaceReads:
    """The failed reads by namespace and resource."""

    def __init__(
        self,
        names: tuple[str, ...],
        cache: Cache,
        metrics: OperatorMetrics,
        *,
        recovered: Callable[[], None],
    ) -> None:
        """With `recovered`, a function that is called whenever something can be read again."""
        self._names = names
        self._cache = cache
        self._metrics = metrics
        self._recovered = recovered
        self._failed: dict[str, dict[str, ApiError]] = {}
        self._changed = asyncio.Event()
        for name in names if self.are_isolated else ():
            metrics.namespace_unreadable.labels(name).set(0)

    @property
    def are_isolated(self) -> bool:
        """True if a namespace that cannot be read leaves the others unaffected."""
        return len(self._names) > 1

    def report_of(self, namespace: str | None, what: str) -> Report | None:
        """Return the function to which one reader reports; None if its failures end the process."""
        if namespace is None or not self.are_isolated:
            return None

        def report(problem: ApiError | None) -> None:
            self.note(namespace, what, problem)

        return report

    def note(self, namespace: str, what: str, problem: ApiError | None) -> None:
        """Record that `what` could not be read in a namespace, or that it could (`problem=None`)."""
        failed = self._failed.setdefault(namespace, {})
        was_held = bool(failed)
        if problem is not None:
            failed[what] = problem
        elif failed.pop(what, None) is not None:
            self._recovered()
        self._changed.set()
        self._changed = asyncio.Event()  # so each waiter checks once per change
        if bool(failed) == was_held:
            return
        self._metrics.namespace_unreadable.labels(namespace).set(bool(failed))
        if failed:
            self._cache.hold(namespace)
            log.warning(
                "namespace cannot be read: its services are not reconciled",
                namespace=namespace,
                resource=what,
                error=str(problem),
            )
        else:
            self._cache.resume(namespace)
            log.info("namespace can be read again", namespace=namespace)

    async def wait_for(self, namespace: str) -> None:
        """Wait until this namespace can be read."""
        while self._failed.get(namespace):
            await self._changed.wait()

    async def wait_for_one(self) -> None:
        """Wait until at least one namespace can be read.

        Raises:
            ApiError: all reads are denied (401, 403): waiting would hide it.
        """
        while self.are_isolated and (problem := self._common_problem()) is not None:
            if problem.is_denial:
                raise problem
            await self._changed.wait()

    def _common_problem(self) -> ApiError | None:
        """Return why no namespace can be read; a denial only if all are denied. Else return None."""
        worst = []
        for name in self._names:
            problems = list(self._failed.get(name, {}).values())
            if not problems:
                return None
            worst.append(next((p for p in problems if p.is_denial), problems[0]))
        return next((problem for problem in worst if not problem.is_denial), worst[0])


async def watch_each(
    names: tuple[str, ...],
    watch: Callable[[tuple[str, ...]], Awaitable[None]],
    reads: NamespaceReads,
    jitter: Callable[[float], float],
) -> None:
    """Run one `watch` for all, or one for each of several namespaces, which then fail separately.

    A namespace that cannot be read is watched once it can be.

    Raises:
        Exception: the error of the only watch, or of the last of several that still ran.
    """
    if len(names) <= 1:
        await _watch_anew(watch, names, jitter)
        return
    down = set(names)

    async def keep(name: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            await reads.wait_for(name)
            began = loop.time()
            down.discard(name)
            try:
                await _watch_anew(watch, (name,), jitter)
            except Exception as problem:  # the event source raises errors of any type
                down.add(name)
                if len(down) == len(names):
                    raise
                if loop.time() - began > MAX_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
                if pause_s == FIRST_PAUSE_S:
                    log.warning("watch of services ended", namespace=name, error=str(problem))
            await asyncio.sleep(jitter(pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(keep(name), name=f"watch inferenceservices in {name}")


async def _watch_anew(
    watch: Callable[[tuple[str, ...]], Awaitable[None]],
    names: tuple[str, ...],
    jitter: Callable[[float], float],
) -> None:
    """Run `watch`, and restart it when the API server responds that it has expired (410).

    kopf lists again if an event in the watch says 410, but ends if the response itself does.
    """
    while True:
        try:
            await watch(names)
        except Exception as problem:
            if getattr(problem, "status", None) != HTTPStatus.GONE:
                raise
            log.info("watch of services expired: restarting", namespaces=list(names))
            await asyncio.sleep(jitter(FIRST_PAUSE_S))
        else:
            return
