"""Services that sleep, as the product plays them: the operator's own decisions, and the rules of the gateway's hold.

`reconcile.sleep` decides about sleep and wake, `autoscale.arbitrate` and `common.budget` about accelerators.
The hold (`fleetkeeper_gateway.hold`) is modeled: a request waits until a replica takes it or its time is over,
and its service is marked once for each sleep.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import Component
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.autoscale.arbitrate import Lack, Want, arbitrate
from fleetkeeper.autoscale.constants import EARLY_IDLE_S, TICK_S, WAKE_LACKS_S
from fleetkeeper.autoscale.rules.idle import EarlySleep, early_sleep_cost
from fleetkeeper.common.budget import (
    Budget,
    Holding,
    ServiceKey,
    Usage,
    bounded_replicas,
)
from fleetkeeper.common.sleep import NOT_IDLE, Idle, Sleep, Wake
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.observe.diagnosis import Diagnosis
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem
from fleetkeeper.reconcile.sleep import decide_sleep
from fleetkeeper.reconcile.types import Kind, Pod, Revision, Snapshot, Workload
from fleetkeeper.simulate.closed_loop import EPOCH_S
from fleetkeeper.simulate.cluster import SimulatedPod
from fleetkeeper.simulate.pool.services import Member, Service
from fleetkeeper.simulate.pool.world import PATIENCE_S, Asked, World
from fleetkeeper_contract.sleep import MAX_RETRY_AFTER_S, SleepState, WakeMark, retry_after_s
from fleetkeeper_contract.tiers import Tier

HOLD_S: Final = 55.0
"""`gateway.hold.seconds`."""
TRY_S: Final = 0.25
"""Time between the attempts of held requests."""
ORDER_S: Final = 0.1
ORDER_SIGMA: Final = math.log(4.0) / 1.645
"""Time from a held request to the order of a replica, lognormal: measured 0.1 s, and 0.4 s at P95."""
CONTEXT: Final = replace(default_context(), grant_keys="simulated")
REVISION: Final = Revision("simulated", "simulated", "simulated", 1, "simulated", EPOCH_S)
FAILED: Final = Diagnosis(
    current_problems=(Problem(Reason.CRASH_LOOP, "The start failed.", EPOCH_S, terminations=3),)
)


def why_awake(spec: InferenceServiceSpec) -> str:
    """Return why a service would never sleep, empty if it would."""
    if spec.scaling.sleep is None:
        return "never sleeps: add scaling.sleep"
    nothing = Facts(None, None, (), None, (), ())
    inputs = ReconcileInputs(Snapshot({}), CONTEXT, nothing, Diagnosis(), {}, 1, EPOCH_S)
    return decide_sleep(inputs, spec, 0, was_good=True).sleep.message


class Sleeper(Service):
    """A service with `scaling.sleep`, its part of the operator, and its line in the gateway."""

    def __init__(self, *arguments: Any, operator: Operator) -> None:  # noqa: ANN401 - of Service
        super().__init__(*arguments)
        self.sleep = Sleep(1, SleepState.ASLEEP, since=EPOCH_S)
        self._operator = operator
        self._mark: WakeMark | None = None
        self._marked = 0
        """Number of the last sleep for which a mark is under way."""
        self._diagnosis = Diagnosis()
        self._idle = NOT_IDLE
        self.sleeps_for = ""
        """The service that the last arbitration asked it to sleep for."""
        self._line: list[Asked] = []
        self._window = 1
        self._is_trying = False
        self._woke_at = EPOCH_S
        self._is_ordered = True

    # -- gateway ------------------------------------------------------------------------------------

    def ask(self, request: Asked) -> None:
        """Send a try to a replica, or hold it."""
        if self.sleep.state is None and not self._line:
            if not self.send(request):
                self.refuse(request, 1.0)
            return
        request.was_held = True
        request.expires = min(self.world.now + HOLD_S, request.asked_at + PATIENCE_S)
        self._line.append(request)
        self.world.at(request.expires, partial(self._expire, request))
        self._want()

    def _want(self) -> None:
        """Write a mark, unless one stands for this sleep."""
        sleep = self.sleep
        if sleep.state in (None, SleepState.WAKING) or self._marked == sleep.number:
            return
        self._marked = sleep.number
        delay_s = ORDER_S * math.exp(ORDER_SIGMA * self._random.gauss(0.0, 1.0))
        mark = WakeMark(sleep.number, Tier.STANDARD)
        self.world.at(self.world.now + delay_s, partial(self._put_mark, mark))

    def _put_mark(self, mark: WakeMark) -> None:
        self._mark = mark
        self.reconcile()

    def _expire(self, request: Asked) -> None:
        if request in self._line and self.world.now >= request.expires:
            passed_s = self.world.now - self.sleep.since if self.sleep.is_waking else 0.0
            self._line.remove(request)
            self.refuse(request, retry_after_s(self.sleep.start_seconds, passed_s))

    def _release(self) -> None:
        """Let the first requests of the line try: one more after each that was accepted, half after a refusal."""
        self._is_trying = self.sleep.state is None and bool(self._line)
        if not self._is_trying:
            return
        for request in self._line[: self._window]:
            if not self.send(request):
                self._window = max(1, self._window // 2)
                break
            self._line.remove(request)
            self._window += 1
        self.world.at(self.world.now + TRY_S, self._release)

    # -- operator -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Read the replicas, and decide where time alone may change something."""
        self._idle = self._read_idle()
        if self._is_due():
            self.reconcile()

    def _is_due(self) -> bool:
        """Return whether time alone may change the decision. The budget is the arbitration's part."""
        sleep = self.sleep
        if sleep.is_waking:
            return self.cluster.wanted > 0
        if sleep.is_asleep:
            return self._mark is not None and self._mark.number == sleep.number
        return self._idle.is_idle or sleep.state is not None

    def _read_idle(self) -> Idle:
        """Return whether no replica had a request for `afterIdleSeconds`, or for less if it is asked to sleep."""
        settings = self.member.spec.scaling.sleep
        if settings is None:
            return NOT_IDLE
        after_s = float(settings.after_idle_seconds)
        if self.sleeps_for or self.sleep.state is SleepState.GOING_TO_SLEEP:
            after_s = min(after_s, EARLY_IDLE_S)
        is_idle = self._idle_s() >= after_s
        return Idle(is_idle=is_idle, read_at=self.world.now, sleeps_for=self.sleeps_for)

    def _idle_s(self) -> float:
        """Return the time without a request; -1 if one runs, or a replica is not ready."""
        now, pods = self.world.now, self.cluster.pods
        for pod in pods.values():
            self.cluster.advance(pod, now)
        engines = [pod.engine for pod in pods.values() if pod.engine is not None]
        if not pods or len(engines) < len(pods) or not all(engine.is_idle for engine in engines):
            return -1.0
        return now - max(engine.time for engine in engines)

    def _early_sleep(self) -> EarlySleep | None:
        """Return what the control loop knows of it if it may sleep early: every tick reads the replicas."""
        settings, idle_s = self.member.spec.scaling.sleep, self._idle_s()
        if settings is None or self.sleep.state is not None or idle_s < EARLY_IDLE_S:
            return None
        pods = self.cluster.pods.values()
        starts = [(pod.ready_since or self.world.now, pod.created) for pod in pods]
        awake_s = self.world.now - max(self.sleep.since, min(ready for ready, _ in starts))
        return EarlySleep(
            early_sleep_cost(max(ready - created for ready, created in starts), idle_s),
            was_awake=awake_s >= settings.min_awake_seconds,
            is_asked=bool(self.sleeps_for),
            nodes=("",) * len(pods),
        )

    def _lack(self) -> Lack:
        if not self.sleep.is_waking or self.sleep.failures:
            return Lack.NOTHING
        waited_s = self.world.now - self.sleep.since
        return Lack.CONFIRMED if waited_s >= WAKE_LACKS_S else Lack.LONG

    def reconcile(self) -> None:
        """Decide the next state of the sleep, and carry it out: first the status, then the replicas."""
        before = self.sleep
        gpus = self.member.model.gpus
        self.sleep = decide_sleep(self._inputs(), self.member.spec, gpus, was_good=True).sleep
        if self.sleep.state is not before.state:
            self._changed(before)
        if not self.sleep.is_asleep and self.cluster.wanted < self.replicas:
            self._order()

    def _changed(self, before: Sleep) -> None:
        now, tally, counts = self.world.now, self.tally, not self.world.is_over
        if self.sleep.is_waking:
            tally.wakes += counts
            self._woke_at, self._is_ordered = now, False
        elif before.is_waking:
            tally.waking_s += now - self._woke_at
        if self.sleep.is_asleep:
            tally.sleeps += counts and not before.is_waking
            self.scale(0)
        if self.sleep.failures > before.failures:
            line, self._line = self._line, []
            for request in line:
                self.refuse(request, MAX_RETRY_AFTER_S)
        if self.sleep.state is None and not self._is_trying:
            self._window = 1
            self._release()

    def _order(self) -> None:
        """Create the replicas that the budget allows."""
        allowance = self._operator.usage().allowance(self.member.key)
        gpus, live = self.member.model.gpus, self.cluster.wanted
        replicas, _ = bounded_replicas(self.replicas, live, gpus, allowance)
        if replicas > live:
            self._end_budget_wait()
            self.scale(replicas)

    def _end_budget_wait(self) -> None:
        if not self._is_ordered:
            self._is_ordered = True
            self.tally.budget_wait_s += self.world.now - self._woke_at

    def close(self) -> None:
        """Count the wake that the end of the run cuts off."""
        if self.sleep.is_waking:
            self.tally.waking_s += self.world.now - self._woke_at
            self._end_budget_wait()

    def start_failed(self, pod: SimulatedPod) -> None:
        """Let the operator see that the pod ends again and again, and start it again if it is kept."""
        self._diagnosis = FAILED
        self.reconcile()
        self._diagnosis = Diagnosis()
        if pod.removed_at is None:
            super().start_failed(pod)

    def became_ready(self) -> None:
        """Let the operator see the pod."""
        self.reconcile()

    def _inputs(self) -> ReconcileInputs:
        """Return what the operator's cache has of the service."""
        pods = tuple(map(_engine_pod, self.cluster.pods.values()))
        router = Pod("router", "router", "", Component.ROUTER, None, "", EPOCH_S, ready=True)
        wake = Wake(can_wake=True, mark=self._mark)
        workload = Workload(
            Kind.DEPLOYMENT, "simulated", "simulated", "1", "", desired_replicas=self.cluster.wanted
        )
        return ReconcileInputs(
            Snapshot({}, idle=self._idle, wake=wake),
            CONTEXT,
            Facts(workload, None, (REVISION,), REVISION, pods, (router,) if pods else ()),
            self._diagnosis,
            {"sleep": self.sleep.to_status(), "observedGeneration": 1},
            1,
            self.world.now,
        )

    def want(self) -> Want:
        """Return its recommendation, as the control loop makes one."""
        (namespace, name), supplied = self.member.key, self.cluster.wanted
        return Want(
            namespace,
            name,
            0 if self.sleep.is_asleep else self.replicas,
            supplied,
            self.replicas,
            self.member.model.gpus,
            self.sleep.tier or Tier.STANDARD,
            lacks=self._lack(),
            early_sleep=self._early_sleep(),
            goes_to_sleep=self.sleep.state is SleepState.GOING_TO_SLEEP,
            waits_since=self.sleep.since if self.sleep.is_waking else math.inf,
        )


def _engine_pod(pod: SimulatedPod) -> Pod:
    return Pod(
        pod.name,
        pod.name,
        "",
        Component.ENGINE,
        REVISION.uid,
        "",
        pod.created,
        ready=pod.engine is not None,
        ready_since=pod.ready_since,
    )


class Operator:
    """The parts of the operator that see all services: the tick, and the budget."""

    def __init__(self, world: World, budget: Budget) -> None:
        self.services: dict[ServiceKey, Sleeper] = {}
        self._budget = budget
        self._world = world

    def add(self, member: Member, seed: int, failed_ratio: float) -> Sleeper:
        """Return a new service."""
        service = Sleeper(self._world, member, seed, failed_ratio, operator=self)
        self.services[member.key] = service
        return service

    def run(self) -> None:
        """Tick from now on."""
        self._world.every(TICK_S, self._tick)

    def _tick(self) -> None:
        for service in self.services.values():
            service.tick()
            service.sleeps_for = ""
        if all(
            each.sleep.is_asleep or each.cluster.wanted >= each.replicas
            for each in self.services.values()
        ):
            return  # no service lacks a replica
        wants = [service.want() for service in self.services.values()]
        for key, allocation in arbitrate(wants, self._budget, self._holdings()).items():
            self.services[key].sleeps_for = allocation.sleeps_for
            if allocation.replicas > self.services[key].cluster.wanted:
                self.services[key].reconcile()

    def usage(self) -> Usage:
        """Return the accelerators in use."""
        return Usage(self._budget, self._holdings())

    def _holdings(self) -> dict[ServiceKey, Holding]:
        return {key: service.holding() for key, service in self.services.items()}
