"""Holds requests for services that sleep, and asks for their wake."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Final, Protocol, Self

from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold import metrics
from fleetkeeper_gateway.hold.budget import OVERHEAD_BYTES, HoldBudget
from fleetkeeper_gateway.hold.line import Line, Waiter
from fleetkeeper_gateway.hold.marks import WakeMarks
from fleetkeeper_gateway.hold.settings import HoldSettings
from fleetkeeper_gateway.hold.states import SeenStates, retry_after_s
from fleetkeeper_gateway.interfaces import HoldRefused, Service, Services
from fleetkeeper_gateway.kubernetes.settings import load_credentials

DRAINING: Final = ("draining", "The gateway is shutting down.", 1)
"""Code, reason and Retry-After of a hold that the end of the process ends."""


class Marks(Protocol):
    """The writer of wake marks."""

    def want(self, service: Service, tier: Tier) -> None:
        """Ask for the mark of a service that sleeps. Requests that wait ask repeatedly."""

    async def run(self) -> None:
        """Write until cancelled."""


class Hold:
    """The held requests of the process. There is a line for each service with held requests."""

    def __init__(
        self,
        services: Services,
        marks: Marks | None,
        *,
        hold_s: float,
        total_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `run` serves the lines. Without `marks` nothing is held that only a mark wakes."""
        self.holding: set[str] = set()
        """Services (NAMESPACE/NAME) whose further requests go behind the held ones."""
        self._services = services
        self._marks = marks
        self._hold_s = hold_s
        self._monotonic = monotonic
        self._budget = HoldBudget(total_bytes)
        self._seen = SeenStates()
        self._lines: dict[str, Line] = {}
        self._tasks = asyncio.TaskGroup()
        self._is_draining = False

    async def run(self) -> None:
        """Serve the lines, and write the marks, until cancelled."""
        metrics.HELD.set_function(lambda: sum(line.held for line in self._lines.values()))
        metrics.HELD_BYTES.set_function(lambda: self._budget.held_bytes)
        async with self._tasks as tasks:
            if self._marks is not None:
                tasks.create_task(self._marks.run())
            await asyncio.Event().wait()

    def refusal(self, service: Service, *, wakes: bool = False) -> HoldRefused:
        """Return the refusal of a request that is never held, and mark its service if it `wakes`."""
        if wakes:
            self._want(service, Tier.BATCH)
        why = f"{service.path} sleeps."
        if service.sleep is not None and service.sleep.state is SleepState.SWAPPING:
            why = f"The only replica of {service.path} is being replaced."
        return self._refused("service_asleep", why, service)

    def place(
        self, service: Service, tier: Tier, tenant: Hashable, model: str, size: int
    ) -> HeldPlace:
        """Hold a request with a body of `size` bytes.

        Raises:
            HoldRefused: if it cannot be held.
        """
        if self._marks is None and service.sleep is not None and service.sleep.ends_by_mark:
            raise self.refusal(service)
        if self._is_draining:
            raise HoldRefused(*DRAINING)
        self._want(service, tier)
        size += OVERHEAD_BYTES
        if not self._budget.take(_owners(tenant, service.path), size):
            raise self._refused(
                "hold_full", f"Too many requests wait for {service.path} or for others.", service
            )
        now = self._monotonic()
        line = self._lines.get(service.path)
        if line is None:
            line = self._lines[service.path] = Line(service.path, self._hold_s, now)
        waiter = line.join(tier, tenant, model, now)
        self._serve(service, line)
        return HeldPlace(self, service, line, waiter, size)

    def drain(self) -> None:
        """End all holds, and begin no other."""
        self._is_draining = True
        for line in self._lines.values():
            line.changed.set()

    def connected(self, line: Line, waiter: Waiter) -> None:
        """Note that the attempt of a request has a connection."""
        line.connected(waiter, self._monotonic())

    def refused(self, service: Service, line: Line, waiter: Waiter, *, is_shed: bool) -> None:
        """Return a request to its place."""
        line.refused(waiter, self._monotonic(), is_shed=is_shed)
        self._serve(service, line)

    def left(self, line: Line, waiter: Waiter, size: int, *, is_sent: bool) -> None:
        """Forget a request that was answered, or whose hold ended."""
        now = self._monotonic()
        if is_sent:
            line.accepted(waiter, now)
        line.leave(waiter)
        self._budget.give_back(_owners(waiter.tenant, line.path), size)
        metrics.ENDED.labels(waiter.outcome).inc()
        metrics.SECONDS.observe(min(now, waiter.ended_at) - waiter.joined)
        self._forget(line)

    def _serve(self, service: Service, line: Line) -> None:
        if not line.is_served:
            line.is_served = True
            self._tasks.create_task(self._run_line(service, line))

    async def _run_line(self, first: Service, line: Line) -> None:
        """Step while a request of the line is held."""
        self.holding.add(line.path)
        while line.held:
            line.changed.clear()
            now = self._monotonic()
            service = self._services.named(first.namespace, first.name)
            age_s = self._seen.age_s(service, now) if service is not None else 0.0
            if self._is_draining:
                line.end_all(*DRAINING, now)
            wait_s = line.step(now, service, age_s)
            if service is not None and line.held:
                self._want(service, line.tier)
            if now - line.awake_since >= self._hold_s:
                # Those that waited for the wake are gone. Further requests get the answer of the service itself.
                self.holding.discard(line.path)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await line.changed.wait()
        line.is_served = False
        self.holding.discard(line.path)
        self._forget(line)

    def _forget(self, line: Line) -> None:
        if not line.waiters and not line.is_served:
            self._lines.pop(line.path, None)

    def _want(self, service: Service, tier: Tier) -> None:
        if self._marks is not None:
            self._marks.want(service, tier)

    def _refused(self, code: str, why: str, service: Service) -> HoldRefused:
        age_s = self._seen.age_s(service, self._monotonic())
        return HoldRefused(code, why, retry_after_s(service.sleep, age_s))


class HeldPlace:
    """The place of one held request. Leaving its context without an exception means that it was answered."""

    __slots__ = ("_hold", "_line", "_service", "_size", "_waiter")

    def __init__(
        self,
        hold: Hold,
        service: Service,
        line: Line,
        waiter: Waiter,
        size: int,
    ) -> None:
        self._hold = hold
        self._service = service
        self._line = line
        self._waiter = waiter
        self._size = size

    def __enter__(self) -> Self:
        """Hold the request."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the line."""
        self._hold.left(self._line, self._waiter, self._size, is_sent=kind is None)

    async def turn(self) -> None:
        """Wait until the request may try.

        Raises:
            HoldRefused: if it is not held anymore.
        """
        refused = await self._waiter.turn
        if refused is not None:
            raise refused

    def connected(self) -> None:
        """Note that the attempt has a connection."""
        self._hold.connected(self._line, self._waiter)

    def refused(self, *, is_shed: bool) -> None:
        """Take its place again after an attempt that was not accepted.

        Args:
            is_shed: True if a replica answered that it takes no more requests now.
        """
        self._hold.refused(self._service, self._line, self._waiter, is_shed=is_shed)


def _owners(tenant: Hashable, path: str) -> tuple[Hashable, Hashable]:
    return ("tenant", tenant), ("service", path)


def create_hold(settings: HoldSettings, services: Services) -> Hold:
    """Return the hold that the settings describe; call `run` in a task.

    Raises:
        NoCredentials: the API server's address or our credentials cannot be loaded.
    """
    marks = None
    if settings.wake_marks:
        namespace, _, name = settings.wake_marks.partition("/")
        marks = WakeMarks((namespace, name), services, load_credentials(settings.kubeconfig))
    return Hold(services, marks, hold_s=settings.hold_seconds, total_bytes=settings.hold_bytes)
