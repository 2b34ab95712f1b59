"""The control loop, which turns measurements into limits, replicas and admission every few seconds.

One tick for all services:

    samples of all pods (from Prometheus; what it does not know, from the pods themselves)
      -> decide_service for each -> arbitrate over all -> build_report for each
      -> limits to the dispatcher, events to the recorder; allocations and status to the reconciler

This module does not decide. A service whose decision fails keeps its last one; others are not
affected.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import RATE_S, TICK_S
from fleetkeeper.autoscale.decided import decisions_made
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.gauges import counts_of
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.starts import starts_of
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import ControlInputs
from fleetkeeper.common.values import Event, StartProgress
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime.autoscaler.arbiter import Arbiter
from fleetkeeper.runtime.autoscaler.decision_log import log_decisions
from fleetkeeper.runtime.autoscaler.dispatcher import Dispatcher, Engines, ReplacePod
from fleetkeeper.runtime.autoscaler.fleet_events import FleetEvents
from fleetkeeper.runtime.autoscaler.inputs import is_unseen
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.readings import Readings, Source
from fleetkeeper.runtime.autoscaler.service_state import PENDING, ServiceStates, ServiceTick
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.reconciler.control_view import ControlView
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger

Item = TypeVar("Item")
SERVICES_PER_YIELD: Final = 20
"""Services decided between two yields to other tasks: 10 to 20 ms."""


class Recorder(Protocol):
    """The recorder of events."""

    def record(self, key: Key, event: Event) -> None:
        """Queue an event on a service."""

    def record_fleet(self, event: Event) -> None:
        """Queue an event about the fleet."""


class ControlLoop:
    """The control loop of the leader. The planner's snapshots include its `view`."""

    def __init__(
        self,
        *,
        cache: Cache,
        queue: KeyedQueue,
        context: PlanContext,
        source: Source,
        engines: Engines,
        replace_pod: ReplacePod,
        recorder: Recorder,
        metrics: ControlMetrics,
        defects: Defects,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        can_steer: bool = True,
        ledger: GpuLedger,
    ) -> None:
        """With `can_steer=False` (no control key) limits and restarts are only computed and reported."""
        self._cache = cache
        self._queue = queue
        self._source = source
        self.dispatcher = Dispatcher(
            engines, replace_pod, recorder.record, metrics=metrics, defects=defects, now=now
        )
        self._events = FleetEvents(recorder.record, recorder.record_fleet)
        self._metrics = metrics
        self._defects = defects
        self._now = now
        self._monotonic = monotonic
        self._can_steer = can_steer
        self._ledger = ledger
        self._arbiter = Arbiter(self._ledger, defects)
        self._states = ServiceStates(cache, context=context, can_steer=can_steer, now=now)
        self._started = now()

    # -- for the controller -----------------------------------------------------------------------

    def view(self, key: Key) -> ControlView:
        """Return the latest result for this service; pending until it is decided."""
        state = self._states.get(key)
        return state.view if state is not None else PENDING

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""
        self._states.forget(key)
        self._metrics.forget(key)

    def refused_replicas(self, key: Key) -> None:
        """Count a refused write of the engine Deployment, for the control breaker."""
        state = self._states.get(key)
        if state is not None:
            state.failed_writes += 1

    # -- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick until cancelled. A tick that takes too long delays the next; ticks never overlap.

        Raises:
            ExceptionGroup: with LeaseLost, when this process must not write anymore.
        """
        self._started = self._now()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.dispatcher.run(), name="control requests")
            group.create_task(self._tick_on(), name="control ticks")

    def flush_events(self) -> None:
        """Record the events that wait at the end of the process: its successor has none of them."""
        self._events.flush(math.inf)

    async def _tick_on(self) -> None:
        while True:
            began = self._monotonic()
            with self._defects.contained("tick"):
                await self.tick()
            took_s = self._monotonic() - began
            self._metrics.tick_seconds.observe(took_s)
            await asyncio.sleep(max(0.0, TICK_S - took_s))

    async def tick(self) -> None:
        """Run one tick for all services. The dispatcher sends the resulting requests later."""
        self._events.flush(self._now())
        service_ticks = [service_tick async for service_tick in self._service_ticks()]
        if not service_ticks:
            return
        readings = Readings({})
        with self._defects.contained("measure"):
            readings = await self._source.observe(
                [service_tick.target for service_tick in service_ticks], self._now()
            )
        now = self._now()
        decided = []
        async for service_tick in _yielding(service_ticks):
            with self._defects.contained("decide", service_tick.key):
                decided.append((service_tick, *self._decide(service_tick, readings, now)))
        allocations = self._arbiter.allocations(
            [(service_tick.key, decision.want) for service_tick, decision, _ in decided]
        )
        async for service_tick, decision, memory in _yielding(decided):
            if (
                self._states.get(service_tick.key) is service_tick.state
                and service_tick.key in allocations
            ):
                with self._defects.contained("report", service_tick.key):
                    self._carry_over(
                        service_tick,
                        allocations[service_tick.key],
                        decision,
                        memory,
                        now,
                        starts=starts_of(readings.starts.get(service_tick.key, ())),
                    )

    def _is_sure(self, service_tick: ServiceTick, decision: ControlDecision, now: float) -> bool:
        """Return whether this result replaces the one that the previous process wrote.

        Rates need a few samples. Until they are known, or have had time to become known, a missing
        rate does not replace the status. An event does.
        """
        return (
            not service_tick.state.view.is_pending
            or not _has_report(service_tick.state.service)
            or decision.signals.known
            or now - self._started >= RATE_S
            or bool(decision.events)
        )

    async def _service_ticks(self) -> AsyncIterator[ServiceTick]:
        async for key in _yielding(self._cache.services()):
            if self._cache.is_held(key):
                continue
            service_tick = None
            with self._defects.contained("observe", key):
                service_tick = self._states.service_tick(key)
            if service_tick is not None:
                yield service_tick

    def _decide(
        self, service_tick: ServiceTick, readings: Readings, now: float
    ) -> tuple[ControlDecision, ControlMemory]:
        """Decide one service."""
        state, fleet = service_tick.state, service_tick.fleet
        inputs = ControlInputs(
            namespace=service_tick.key.namespace,
            name=service_tick.key.name,
            settings=service_tick.settings,
            replicas=fleet.replicas,
            started=self._started,
            pods=fleet.pods,
            samples=readings.samples.get(service_tick.key, ()),
            allocated_replicas=state.allocated,
            put_outcomes=state.outcomes,
            failed_writes=state.failed_writes,
            prometheus_lost=service_tick.key in readings.lost,
            checks_directly=readings.checks_directly(service_tick.key),
            prometheus_disputed=service_tick.key in readings.disputed,
            scale_up_blocked=fleet.scale_up_blocked,
            out_of_memory_pods=fleet.out_of_memory_pods,
            rolling_out=fleet.rolling_out or is_unseen(state.service),
            gpus_per_replica=fleet.gpus_per_replica,
            node_needs=fleet.node_needs,
            backlog=readings.backlogs.get(service_tick.key),
        )
        state.outcomes, state.failed_writes = (), 0
        return decide_service(inputs, state.memory, now)

    def _carry_over(
        self,
        service_tick: ServiceTick,
        allocation: Allocation,
        decision: ControlDecision,
        memory: ControlMemory,
        now: float,
        *,
        starts: Mapping[str, StartProgress],
    ) -> None:
        """Make the decision the planner's next view; queue a reconcile if it differs."""
        state = service_tick.state
        result, reported = build_report(decision, allocation, memory, now)
        before, memory_before = state.view, state.memory
        state.asks_pods = decision.asks_pods
        if self._is_sure(service_tick, decision, now):
            state.memory = reported
            state.view = ControlView(
                result.allocation,
                result.report,
                decision.pod_load,
                starts=starts,
                idle=decision.idle,
            )
        else:
            state.memory = memory
            state.view = replace(
                before,
                allocation=result.allocation,
                pod_load=decision.pod_load,
                starts=starts,
                idle=decision.idle,
            )
        made = decisions_made(decision, memory_before, state.memory)
        log_decisions(service_tick.key, decision, made)
        state.allocated = result.allocation.replicas if result.allocation is not None else None
        self._metrics.show(service_tick.key, result.metrics)
        self._metrics.count(service_tick.key, counts_of(decision, made))
        is_new_limit = self._ledger.limit(service_tick.key, allocation, decision.want)
        if is_new_limit or _is_news(before, state.view):
            self._queue.add(service_tick.key)
        for event in result.events:
            self._events.add(service_tick.key, event, now)
        if self._can_steer:
            for put in decision.puts:
                self.dispatcher.send(service_tick.key, put, state.take)
        pods = {pod.name: pod for pod in service_tick.fleet.pods}
        for name, removal in decision.replace_pods.items():
            self.dispatcher.replace(service_tick.key, pods[name], removal)


def _has_report(service: InferenceService | None) -> bool:
    """Return whether the status holds a report of the control loop."""
    return service is not None and bool(service.status.get("breaker"))


def _is_news(before: ControlView, after: ControlView) -> bool:
    """Return whether the planner would act on the change: an allocation's text always changes.

    So does the time of the last read of an idle service. A planner that needs a newer one asks again by itself.
    """
    allocations = [
        allocation and (allocation.replicas, allocation.reason)
        for allocation in (before.allocation, after.allocation)
    ]
    stages = [
        {name: start.stage for name, start in view.starts.items()} for view in (before, after)
    ]
    return (
        allocations[0] != allocations[1]
        or before.control_report != after.control_report
        or stages[0] != stages[1]
        or before.idle.is_idle != after.idle.is_idle
        or before.idle.sleeps_for != after.idle.sleeps_for
    )


async def _yielding(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield the items, and let other tasks run in between: leases and probes wait for no tick."""
    for number, item in enumerate(items):
        if number % SERVICES_PER_YIELD == SERVICES_PER_YIELD - 1:
            await asyncio.sleep(0)
        yield item
