"""Play a load against a simulated cluster under an autoscaler, in virtual time. Seeded and pure.

The same scenario gives the same outcome. Requests arrive in the order of time; between two arrivals,
the autoscaler ticks and pods start or end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from time import process_time
from typing import Final

from fleetkeeper.simulate.arguments import Batch
from fleetkeeper.simulate.autoscalers import Autoscaler, ControlLoop
from fleetkeeper.simulate.batch_client import BatchClient, batch_client
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
    random = Random(scenario.seed)  # noqa: S311 - seeded on purpose
    client = batch_client(
        scenario.batches,
        scenario.line,
        EPOCH_S,
        scenario.seed,
        tier=scenario.batch_tier,
        longest=scenario.engine.blocks * BLOCK_TOKENS,
    )
    outcome = Outcome(scenario.targets, works=client.works)
    autoscaler = scenario.autoscaler()
    cluster = Cluster(
        scenario.engine,
        Random(random.random()),  # noqa: S311 - as above
        scenario.cold_start,
        scenario.gpus,
        scenario.routers,
        removes_emptiest=scenario.removes_emptiest,
        pods_come=lambda now: scenario.pods_come(now - EPOCH_S),
        slowness=lambda now: scenario.slowness(now - EPOCH_S),
        on_end=lambda requests: outcome.ended(client.others(requests)),
        on_lost=lambda requests: outcome.lost_all(client.others(requests, lost=True)),
    )
    cluster.begin(EPOCH_S, scenario.replicas)
    began = process_time()
    clock = _Clock(scenario, cluster, autoscaler, outcome, client, progress)
    _play(scenario, clock, random)
    cluster.finish(EPOCH_S + scenario.seconds)
    outcome.close(cluster, EPOCH_S, scenario.seconds, scenario.tail_s)
    outcome.unfinished -= client.in_flight
    outcome.control_s = autoscaler.control_s
    outcome.engine_s = process_time() - began - autoscaler.control_s
    return outcome, autoscaler


def _play(scenario: Scenario, clock: _Clock, random: Random) -> None:
    cluster, outcome = clock.cluster, clock.outcome
    for request in scenario.load(random):
        if request.arrived >= scenario.seconds:
            break
        request.arrived += EPOCH_S
        if request.arrived >= clock.next:
            clock.move(request.arrived)
        outcome.arrived(request)
        if not cluster.route(request):
            outcome.refused(request)
    clock.move(EPOCH_S + scenario.seconds)


@dataclass
class _Clock:
    """The events at fixed times: pods and batches move every second, the autoscaler ticks, engines crash."""

    scenario: Scenario
    cluster: Cluster
    autoscaler: Autoscaler
    outcome: Outcome
    client: BatchClient
    progress: Callable[[float], None]
    next: float = EPOCH_S
    _tick_at: float = EPOCH_S
    _crashes: list[Fault] = field(default_factory=list)
    _shown: float = -math.inf

    def __post_init__(self) -> None:
        """Sort the crashes, the last one first."""
        self._crashes = sorted(self.scenario.crashes, key=lambda fault: -fault.at)

    def move(self, until: float) -> None:
        """Do everything that is due up to `until`."""
        while self.next <= until:
            now = self.next
            while self._crashes and now - EPOCH_S >= self._crashes[-1].at:
                self.cluster.crash(self._crashes.pop().number, now)
            self.cluster.move(now)
            if self.client.works:
                self.client.step(self.cluster, now)
            if now >= self._tick_at:
                self._tick_at += self.autoscaler.interval_s
                self.autoscaler.tick(self.cluster, now)
                self.outcome.ticks.append(self._row(now))
            if now - self._shown >= 60.0:
                self._shown = now
                self.progress(now - EPOCH_S)
            self.next = now + MOVE_S

    def _row(self, now: float) -> Tick:
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
