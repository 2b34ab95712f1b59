"""The control loop: every few seconds, what is measured becomes limits, replicas and admission.

One tick for all services:

    samples of all pods (Prometheus; what it does not know is read from the pods themselves)
      -> decide_service for each -> arbitrate over all -> conclude for each
      -> limits to the engines; orders, status and events to the planner's next look

Nothing here decides. A service whose decision fails keeps what it had; the others are decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import BatchingMode
from fleetkeeper.plan.context import PlanContext
from fleetkeeper.plan.control.arbitrate import Budget, Order, arbitrate
from fleetkeeper.plan.control.conclude import conclude
from fleetkeeper.plan.control.constants import TICK_S
from fleetkeeper.plan.control.memory import ControlMemory
from fleetkeeper.plan.control.outcome import Conclusion, ControlDecision
from fleetkeeper.plan.control.samples import PodSample
from fleetkeeper.plan.control.service import decide_service
from fleetkeeper.plan.control.values import (
    ControlInputs,
    ControlSettings,
    PodOrder,
    PodView,
    PutOutcome,
)
from fleetkeeper.plan.model import Notice
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.control_inputs import (
    Fleet,
    observe_fleet,
    parsed_service,
    read_settings,
    starting_memory,
)
from fleetkeeper.runtime.control_metrics import ControlMetrics
from fleetkeeper.runtime.controller import ControlView
from fleetkeeper.runtime.queue import Key, KeyedQueue

log = structlog.get_logger(__name__)


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


class Engines(Protocol):
    """The engines' control ports."""

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """Sends each order to its pod; an outcome each, whatever happened."""


class ReplacePod(Protocol):
    """Replaces one pod whose engine hangs."""

    async def __call__(self, key: Key, pod: str, uid: str) -> None:
        """Evicts it, this one only."""


class PostNotice(Protocol):
    """Posts one event on a service."""

    async def __call__(self, key: Key, notice: Notice) -> None:
        """For people; a refusal is logged and let go."""


@dataclass(slots=True)
class _Course:
    """What the loop keeps of one service."""

    uid: str
    version: int
    service: InferenceService | None
    memory: ControlMemory
    view: ControlView = field(default_factory=ControlView)
    outcomes: tuple[PutOutcome, ...] = ()
    failed_writes: int = 0
    ordered: int | None = None


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
        """`can_steer` is False without a control key: limits are then computed and reported only."""
        self._cache = cache
        self._queue = queue
        self._context = context
        self._source = source
        self._engines = engines
        self._replace_pod = replace_pod
        self._post_notice = post_notice
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
        """Ticks until cancelled; a tick that takes too long delays the next, they never overlap."""
        self._started = self._now()
        while True:
            began = self._monotonic()
            await self.tick()
            took_s = self._monotonic() - began
            self._metrics.tick_seconds.observe(took_s)
            await asyncio.sleep(max(0.0, self._tick_s - took_s))

    async def tick(self) -> None:
        """One tick for all services."""
        cases = list(self._cases())
        if not cases:
            return
        readings = await self._source.observe([case.target for case in cases], self._now())
        now = self._now()
        decided = [
            (case, *result)
            for case in cases
            if (result := self._decide(case, readings, now)) is not None
        ]
        orders = arbitrate((decision.want for _, decision, _ in decided), self._budget())
        for case, decision, memory in decided:
            order = orders[decision.want.key]
            await self._carry_over(case, order, decision, memory, now)
        await self._steer(decided)

    def _cases(self) -> Iterable[_Case]:
        for key in self._cache.services():
            course = self._course(key)
            if course is None or course.service is None or course.service.deleting:
                continue
            fleet = observe_fleet(self._cache, key, self._now())
            if fleet is not None:
                settings = read_settings(course.service, course.memory)
                if not self._can_steer:
                    settings = replace(settings, batching_mode=BatchingMode.ADVISORY)
                yield _Case(key, course, settings, fleet)

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
        if course is None or course.uid != entry.uid:
            memory = ControlMemory() if service is None else starting_memory(service, self._now())
            course = _Course(entry.uid, entry.version, service, memory)
            if service is not None:
                self._courses[key] = course
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
        )
        course.outcomes, course.failed_writes = (), 0
        try:
            return decide_service(inputs, course.memory, now)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
            log.exception("control decision failed", service=str(case.key))
            self._metrics.failures.inc()
            return None

    async def _carry_over(
        self,
        case: _Case,
        order: Order,
        decision: ControlDecision,
        memory: ControlMemory,
        now: float,
    ) -> None:
        """What was decided becomes the planner's next view; a look follows where it differs."""
        conclusion, course = Conclusion(None, {}, (), ()), case.course
        conclusion, course.memory = conclude(decision, order, memory, now)
        before = course.view
        course.view = ControlView(conclusion.order, conclusion.status, decision.pod_load)
        course.ordered = conclusion.order.replicas if conclusion.order is not None else None
        self._metrics.show(case.key, conclusion.metrics)
        if (before.order, before.control_status) != (conclusion.order, conclusion.status):
            self._queue.add(case.key)
        for notice in conclusion.notices:
            await self._post_notice(case.key, notice)

    async def _steer(self, decided: Sequence[tuple[_Case, ControlDecision, ControlMemory]]) -> None:
        """Limits to the engines, and hung pods replaced."""
        owner = {order.uid: case for case, decision, _ in decided for order in decision.puts}
        puts = [order for _, decision, _ in decided for order in decision.puts]
        if puts:
            outcomes = await self._engines.put_limits(puts)
            for order, outcome in zip(puts, outcomes, strict=True):
                course = owner[order.uid].course
                course.outcomes = (*course.outcomes, outcome)
                self._metrics.puts.labels("ok" if outcome.succeeded else "failed").inc()
        for case, decision, _ in decided:
            uids = {pod.name: pod.uid for pod in case.fleet.pods}
            for pod in decision.replace_pods:
                await self._replace_pod(case.key, pod, uids[pod])

    def _budget(self) -> Budget:
        return Budget(self._context.max_accelerators, _by_namespace(self._context, self._courses))


def _by_namespace(context: PlanContext, keys: Iterable[Key]) -> Mapping[str, int]:
    """The budget of each namespace in use; "*" stands for every namespace not named."""
    named: Mapping[str, Any] = context.max_accelerators_by_namespace
    every = named.get("*")
    budget = {namespace: value for namespace, value in named.items() if namespace != "*"}
    if every is not None:
        for key in keys:
            budget.setdefault(key.namespace, every)
    return budget
