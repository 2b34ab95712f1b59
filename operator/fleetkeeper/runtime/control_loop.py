"""The control loop: every few seconds, what is measured becomes limits, replicas and admission.

One tick for all services:

    samples of all pods (Prometheus; what it does not know is read from the pods themselves)
      -> decide_service for each -> arbitrate over all -> conclude for each
      -> limits and events to the outbox; orders and status to the planner's next look

Nothing here decides. A service whose decision fails keeps what it had; the others are decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import structlog

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import BatchingMode
from fleetkeeper.plan.context import PlanContext
from fleetkeeper.plan.control.arbitrate import Budget, Order, arbitrate
from fleetkeeper.plan.control.conclude import conclude
from fleetkeeper.plan.control.constants import TICK_S
from fleetkeeper.plan.control.memory import ControlMemory
from fleetkeeper.plan.control.outcome import ControlDecision
from fleetkeeper.plan.control.remedies import Remedy
from fleetkeeper.plan.control.samples import PodSample
from fleetkeeper.plan.control.service import decide_service
from fleetkeeper.plan.control.values import (
    ControlInputs,
    ControlSettings,
    PodView,
    PutOutcome,
)
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.control_inputs import (
    Fleet,
    is_unseen,
    observe_fleet,
    parsed_service,
    read_settings,
    starting_memory,
)
from fleetkeeper.runtime.control_metrics import ControlMetrics
from fleetkeeper.runtime.control_outbox import (
    DEFECTS,
    Engines,
    Outbox,
    PostNotice,
    ReplacePod,
)
from fleetkeeper.runtime.controller import ControlView
from fleetkeeper.runtime.queue import Key, KeyedQueue

log = structlog.get_logger(__name__)

Item = TypeVar("Item")
TURN_SERVICES: Final = 20
"""Services decided on in a row: 10 to 20 ms."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service whose pods are to be measured: its objectives decide which bucket edges are read."""

    key: Key
    settings: ControlSettings
    pods: tuple[PodView, ...]


@dataclass(frozen=True, slots=True)
class Readings:
    """Samples by service, and the services of which the source has nothing fresh."""

    samples: Mapping[Key, tuple[PodSample, ...]]
    lost: frozenset[Key] = frozenset()


class Source(Protocol):
    """Where samples come from; it never raises for an outage, it tells what is lost."""

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """The newest samples of the targets' pods."""


@dataclass(slots=True)
class _Course:
    """What the loop keeps of one service."""

    uid: str
    version: int
    service: InferenceService | None
    memory: ControlMemory
    view: ControlView = field(default_factory=ControlView)
    outcomes: tuple[PutOutcome, ...] = ()
    doubted: frozenset[str] = frozenset()
    failed_writes: int = 0
    ordered: int | None = None
    settings: ControlSettings | None = None
    settings_mark: tuple[int, Remedy | None] | None = None

    def take(self, outcome: PutOutcome) -> None:
        """What came of an order, for the next tick; `doubted` are the pods that refused theirs last."""
        self.outcomes = (*self.outcomes, outcome)
        rest = self.doubted - {outcome.pod}
        self.doubted = rest if outcome.succeeded else rest | {outcome.pod}


@dataclass(frozen=True, slots=True)
class _Case:
    """One service in one tick."""

    key: Key
    course: _Course
    settings: ControlSettings
    fleet: Fleet

    @property
    def target(self) -> Target:
        """What of it is to be measured."""
        return Target(self.key, self.settings, self.fleet.pods)


class ControlLoop:
    """Ticks while this process leads. `view` is what the planner's snapshots take of it."""

    def __init__(
        self,
        *,
        cache: Cache,
        queue: KeyedQueue,
        context: PlanContext,
        source: Source,
        engines: Engines,
        replace_pod: ReplacePod,
        post_notice: PostNotice,
        metrics: ControlMetrics,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        can_steer: bool = True,
        tick_s: float = TICK_S,
    ) -> None:
        """`can_steer` is False without a control key: limits and restarts are then computed and reported only."""
        self._cache = cache
        self._queue = queue
        self._context = context
        self._source = source
        self.outbox = Outbox(engines, replace_pod, post_notice, metrics)
        self._metrics = metrics
        self._now = now
        self._monotonic = monotonic
        self._can_steer = can_steer
        self._tick_s = tick_s
        self._courses: dict[Key, _Course] = {}
        self._started = now()

    # -- what the controller asks -----------------------------------------------------------------

    def view(self, key: Key) -> ControlView:
        """The newest word on this service; empty until its first tick."""
        course = self._courses.get(key)
        return course.view if course is not None else ControlView()

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._courses.pop(key, None)
        self._metrics.forget(key)

    def refused_replicas(self, key: Key) -> None:
        """The API server refused to write the engine Deployment: the control breaker counts it."""
        course = self._courses.get(key)
        if course is not None:
            course.failed_writes += 1

    # -- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks until cancelled; a tick that takes too long delays the next, they never overlap.

        Raises:
            ExceptionGroup: with LeaseLost, when this process may not write any more.
        """
        self._started = self._now()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.outbox.run(), name="control outbox")
            group.create_task(self._tick_on(), name="control ticks")

    async def _tick_on(self) -> None:
        while True:
            began = self._monotonic()
            try:
                await self.tick()
            except DEFECTS:
                log.exception("a tick failed: every service keeps what it had")
                self._metrics.failures.inc()
            took_s = self._monotonic() - began
            self._metrics.tick_seconds.observe(took_s)
            await asyncio.sleep(max(0.0, self._tick_s - took_s))

    async def tick(self) -> None:
        """One tick for all services. What others have to be asked for is left to the outbox."""
        cases = [case async for case in self._cases()]
        if not cases:
            return
        readings = await self._source.observe([case.target for case in cases], self._now())
        now = self._now()
        decided = []
        async for case in _in_turns(cases):
            result = self._decide(case, readings, now)
            if result is not None:
                decided.append((case, *result))
        orders = arbitrate((decision.want for _, decision, _ in decided), self._budget())
        async for case, decision, memory in _in_turns(decided):
            if self._courses.get(case.key) is case.course:
                self._carry_over(case, orders[decision.want.key], decision, memory, now)

    async def _cases(self) -> AsyncIterator[_Case]:
        async for key in _in_turns(self._cache.services()):
            course = self._course(key)
            if course is None or course.service is None or course.service.deleting:
                continue
            fleet = observe_fleet(self._cache, key, self._now())
            if fleet is not None:
                yield _Case(key, course, self._settings(course, course.service), fleet)

    def _settings(self, course: _Course, service: InferenceService) -> ControlSettings:
        """Of the spec and the remedy in force; read anew when one of them changed."""
        mark = (course.version, course.memory.remedy)
        if course.settings is None or course.settings_mark != mark:
            settings = read_settings(service, course.memory)
            if not self._can_steer:
                settings = replace(settings, batching_mode=BatchingMode.ADVISORY)
            course.settings, course.settings_mark = settings, mark
        return course.settings

    def _course(self, key: Key) -> _Course | None:
        entry = self._cache.service(key)
        if entry is None:
            return None
        course = self._courses.get(key)
        if course is not None and (course.uid, course.version) == (entry.uid, entry.version):
            return course
        service = parsed_service(
            entry.unpack(), floating_revisions=self._context.floating_revisions
        )
        if course is None or course.uid != entry.uid or (course.service is None and service):
            memory = ControlMemory() if service is None else starting_memory(service, self._now())
            course = self._courses[key] = _Course(entry.uid, entry.version, service, memory)
            return course
        course.version, course.service = entry.version, service
        return course

    def _decide(
        self, case: _Case, readings: Readings, now: float
    ) -> tuple[ControlDecision, ControlMemory] | None:
        """The decision of one service; None when it failed, which is a defect of ours."""
        course, fleet = case.course, case.fleet
        inputs = ControlInputs(
            namespace=case.key.namespace,
            name=case.key.name,
            settings=case.settings,
            replicas=fleet.replicas,
            started=self._started,
            pods=fleet.pods,
            samples=readings.samples.get(case.key, ()),
            ordered_replicas=course.ordered,
            put_outcomes=course.outcomes,
            failed_writes=course.failed_writes,
            prometheus_lost=case.key in readings.lost,
            scale_up_blocked=fleet.scale_up_blocked,
            out_of_memory_pods=fleet.out_of_memory_pods,
            rolling_out=fleet.rolling_out or is_unseen(course.service),
        )
        course.outcomes, course.failed_writes = (), 0
        try:
            return decide_service(inputs, course.memory, now)
        except DEFECTS:
            log.exception("control decision failed", service=str(case.key))
            self._metrics.failures.inc()
            return None

    def _carry_over(
        self,
        case: _Case,
        order: Order,
        decision: ControlDecision,
        memory: ControlMemory,
        now: float,
    ) -> None:
        """What was decided becomes the planner's next view; a look follows where it differs."""
        course = case.course
        try:
            conclusion, course.memory = conclude(decision, order, memory, now)
        except DEFECTS:
            log.exception("control decision failed", service=str(case.key))
            self._metrics.failures.inc()
            return
        before = course.view
        course.view = ControlView(conclusion.order, conclusion.status, decision.pod_load)
        course.ordered = conclusion.order.replicas if conclusion.order is not None else None
        self._metrics.show(case.key, conclusion.metrics)
        if _is_news(before, course.view):
            self._queue.add(case.key)
        for notice in conclusion.notices:
            self.outbox.post(case.key, notice)
        if self._can_steer:
            for put in decision.puts:
                self.outbox.send(put, course.take, doubted=put.pod in course.doubted)
        uids = {pod.name: pod.uid for pod in case.fleet.pods}
        for pod, why in decision.replace_pods.items():
            self.outbox.replace(case.key, pod, uids[pod], why)

    def _budget(self) -> Budget:
        return Budget(self._context.max_accelerators, _by_namespace(self._context, self._courses))


def _is_news(before: ControlView, after: ControlView) -> bool:
    """Whether the planner would do something about it: the words of an order move all the time."""
    orders = [order and (order.replicas, order.reason) for order in (before.order, after.order)]
    return orders[0] != orders[1] or before.control_status != after.control_status


async def _in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """The items, with a turn for everybody else after some: leases and probes wait for no tick."""
    for number, item in enumerate(items):
        if number % TURN_SERVICES == TURN_SERVICES - 1:
            await asyncio.sleep(0)
        yield item


def _by_namespace(context: PlanContext, keys: Iterable[Key]) -> Mapping[str, int]:
    """The budget of each namespace in use; "*" stands for every namespace not named."""
    named: Mapping[str, Any] = context.max_accelerators_by_namespace
    every = named.get("*")
    budget = {namespace: value for namespace, value in named.items() if namespace != "*"}
    if every is not None:
        for key in keys:
            budget.setdefault(key.namespace, every)
    return budget
