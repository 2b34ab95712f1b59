"""Play a load against a simulated cluster under an autoscaler, in virtual time. Seeded and pure.

The same scenario gives the same outcome. Requests arrive in the order of time; between two arrivals,
the autoscaler ticks and pods start or end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from random import Random
from time import process_time
from typing import Final

from fleetkeeper.autoscale.arbitrate import Allocation, arbitrate
from fleetkeeper.common.budget import Budget, Holding, ServiceKey
from fleetkeeper.simulate.arguments import Batch
from fleetkeeper.simulate.autoscalers import Autoscaler, ControlLoop
from fleetkeeper.simulate.batch_client import batch_client
from fleetkeeper.simulate.cluster import Cluster, ColdStart
from fleetkeeper.simulate.engine import H100_8B, EngineSpec
from fleetkeeper.simulate.loads.arrivals import Mix
from fleetkeeper.simulate.outcome import Outcome, Targets, Tick
from fleetkeeper.simulate.requests import Request
from fleetkeeper_steps.running import BLOCK_TOKENS

EPOCH_S: Final = 1_000_000.0
"""Start of virtual time, so that times are never zero."""
MOVE_S: Final = 1.0
"""Pods become ready and end on whole seconds."""

Load = Callable[[Random], Iterator[Request]]
"""A load: yields requests whose arrival counts from 0, in the order of time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The engine of the `number`-th ready pod ends at `at` seconds, and its container starts again."""

    at: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, a cluster and faults. Functions take seconds since the start."""

    seconds: float
    load: Load
    autoscaler: Callable[[], Autoscaler]
    """Returns a new autoscaler for each run."""
    engine: EngineSpec = H100_8B
    replicas: int = 1
    gpus: int = 1
    cold_start: ColdStart = field(default_factory=lambda: ColdStart(60.0))
    targets: Targets = field(default_factory=Targets)
    removes_emptiest: bool = True
    routers: int = 2
    pods_come: Callable[[float], bool] = lambda _: True
    """Returns whether new pods get a GPU."""
    slowness: Callable[[float], float] = lambda _: 1.0
    """Returns the factor on the time of a step."""
    crashes: tuple[Fault, ...] = ()
    seed: int = 1
    tail_s: float = 600.0
    """Time for requests that arrived by the end. It is not billed."""
    batches: tuple[Batch, ...] = ()
    """Work for tier batch in addition to the load."""
    line: Mix = field(default_factory=Mix)
    """Tokens of a line of `batches`."""
    batch_tier: int = 2
    """Index of the tier of `batches`; 1 for stock engines."""


def run(
    scenario: Scenario, progress: Callable[[float], None] = lambda _: None
) -> tuple[Outcome, Autoscaler]:
    """Run a scenario; return what users and the bill saw, and the autoscaler at its end.

    `progress` gets the seconds played, about once a virtual minute.
    """
    (result,) = run_together((scenario,), Budget(), progress)
    return result


def run_together(
    scenarios: Sequence[Scenario],
    budget: Budget,
    progress: Callable[[float], None] = lambda _: None,
) -> list[tuple[Outcome, Autoscaler]]:
    """Run services side by side for the same time; return the outcome and the autoscaler of each.

    The control loops share a GPU budget, so each needs a name of its own. Other autoscalers ignore it.
    """
    services = [_Service(scenario) for scenario in scenarios]
    (seconds,) = {scenario.seconds for scenario in scenarios}
    began = process_time()
    clock = _Clock(services, budget, progress)
    loads = [_arrivals(service, number) for number, service in enumerate(services)]
    for arrived, number, request in merge(*loads):
        if arrived >= clock.next:
            clock.move(arrived)
        service = services[number]
        service.outcome.arrived(request)
        if not service.cluster.route(request):
            service.outcome.refused(request)
    clock.move(EPOCH_S + seconds)
    for service in services:
        service.close()
    took_s = process_time() - began
    for service in services:
        # Engines of several services run alternately, so each gets an equal part.
        service.outcome.engine_s = took_s / len(services) - service.outcome.control_s
    return [(service.outcome, service.autoscaler) for service in services]


def _arrivals(service: _Service, number: int) -> Iterator[tuple[float, int, Request]]:
    scenario = service.scenario
    for request in scenario.load(service.random):
        if request.arrived >= scenario.seconds:
            return
        request.arrived += EPOCH_S
        yield request.arrived, number, request


class _Service:
    """A service in a simulation."""

    def __init__(self, scenario: Scenario) -> None:
        """Create its cluster, and the replicas of the start."""
        self.scenario = scenario
        self.random = Random(scenario.seed)  # noqa: S311 - seeded on purpose
        client = self.client = batch_client(
            scenario.batches,
            scenario.line,
            EPOCH_S,
            scenario.seed,
            tier=scenario.batch_tier,
            longest=scenario.engine.blocks * BLOCK_TOKENS,
        )
        outcome = self.outcome = Outcome(scenario.targets, works=client.works)
        self.autoscaler = scenario.autoscaler()
        self.cluster = Cluster(
            scenario.engine,
            Random(self.random.random()),  # noqa: S311 - as above
            scenario.cold_start,
            scenario.gpus,
            scenario.routers,
            removes_emptiest=scenario.removes_emptiest,
            pods_come=lambda now: scenario.pods_come(now - EPOCH_S),
            slowness=lambda now: scenario.slowness(now - EPOCH_S),
            on_end=lambda requests: outcome.ended(client.others(requests)),
            on_lost=lambda requests: outcome.lost_all(client.others(requests, lost=True)),
        )
        self.cluster.begin(EPOCH_S, scenario.replicas)
        self._tick_at = EPOCH_S
        self._crashes = sorted(scenario.crashes, key=lambda fault: -fault.at)

    def move(self, now: float) -> bool:
        """Do what is due at a time, and return whether the autoscaler ticks."""
        while self._crashes and now - EPOCH_S >= self._crashes[-1].at:
            self.cluster.crash(self._crashes.pop().number, now)
        self.cluster.move(now)
        if self.client.works:
            self.client.step(self.cluster, now)
        if now < self._tick_at:
            return False
        self._tick_at += self.autoscaler.interval_s
        return True

    def holding(self) -> Holding:
        """Return the accelerators of its pods."""
        cluster = self.cluster
        return Holding(cluster.wanted * cluster.gpus, len(cluster.draining) * cluster.gpus)

    def close(self) -> None:
        """Let the requests in the engines end, and add up."""
        scenario, outcome = self.scenario, self.outcome
        self.cluster.finish(EPOCH_S + scenario.seconds)
        outcome.close(self.cluster, EPOCH_S, scenario.seconds, scenario.tail_s)
        outcome.unfinished -= self.client.in_flight
        outcome.control_s = self.autoscaler.control_s

    def row(self, now: float) -> Tick:
        """Return a row of the time line."""
        cluster = self.cluster
        for pod in cluster.pods.values():
            cluster.advance(pod, now)
        engines = [pod.engine for pod in cluster.pods.values() if pod.engine is not None]
        loop = self.autoscaler
        decision = loop.decision if isinstance(loop, ControlLoop) else None
        limits = decision.in_force if decision is not None else None
        return Tick(
            time=now - EPOCH_S,
            replicas=cluster.wanted,
            ready=len(engines),
            arrived=self.outcome.arrivals,
            waiting=sum([engine.waiting for engine in engines]),
            queue_wait_s=decision.signals.queue_wait_s if decision else math.nan,
            batch_time_s=decision.signals.batch_time_s if decision else math.nan,
            sequences=limits.sequences if limits else self.scenario.engine.max_sequences,
            tokens=limits.tokens if limits else self.scenario.engine.max_tokens,
            decision=decision,
        )


@dataclass
class _Clock:
    """The events at fixed times: pods and batches move every second, the autoscalers tick, engines crash."""

    services: Sequence[_Service]
    budget: Budget
    progress: Callable[[float], None]
    next: float = EPOCH_S
    _shown: float = -math.inf

    def move(self, until: float) -> None:
        """Do everything that is due up to `until`."""
        while self.next <= until:
            now = self.next
            ticking = [service for service in self.services if service.move(now)]
            self._tick(ticking, now)
            for service in ticking:
                service.outcome.ticks.append(service.row(now))
            if now - self._shown >= 60.0:
                self._shown = now
                self.progress(now - EPOCH_S)
            self.next = now + MOVE_S

    def _tick(self, ticking: Sequence[_Service], now: float) -> None:
        acts: dict[ServiceKey, Callable[[Allocation], None]] = {}
        holdings: dict[ServiceKey, Holding] = {}
        wants = []
        for service in ticking:
            asked = service.autoscaler.tick(service.cluster, now)
            if asked is None:
                continue
            want, act = asked
            if want.key in acts:
                raise ValueError(f"two services have the name {want.name}")
            wants.append(want)
            acts[want.key] = act
            holdings[want.key] = service.holding()
        for key, allocation in arbitrate(wants, self.budget, holdings).items():
            acts[key](allocation)
