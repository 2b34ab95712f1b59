"""Closed-loop simulation: arrivals, a fleet of modeled engines, and autoscale unchanged.

The simulation is seeded and pure. The router picks the shorter queue of two random replicas. New replicas
become ready after the cold start, and removed ones drain. Faults are functions of time in the scenario.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from fleetkeeper.autoscale.arbitrate import arbitrate
from fleetkeeper.autoscale.capacity.supply import emptiest
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import (
    ControlInputs,
    ControlSettings,
    LimitsRequest,
    PodView,
    PutOutcome,
)
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.engine_model import H100_8B, Engine, EnginePod, Request

EPOCH_S = 1_000_000.0
"""Start of virtual time, so that times are never zero."""


def always(_: float) -> bool:
    """Return True at any time."""
    return True


def never(_: float) -> bool:
    """Return False at any time."""
    return False


def as_modelled(_: float) -> float:
    """Return 1.0 at any time: steps take as long as the engine model says."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. Functions take seconds since the start; `rate` returns arrivals/s.

    `prometheus`: it is configured. `metrics`: it answers. `direct`: pods can be read directly. `puts`:
    engines accept PUTs. `pods_come`: new pods become ready. `slowness`: factor on the modeled time of a
    step. `tiers`: shares of realtime, standard, batch. `prompt`, `generated`: mean tokens per request.
    `slice_s`: time resolution in seconds.
    """

    seconds: float
    rate: Callable[[float], float]
    settings: ControlSettings = field(default_factory=ControlSettings)
    engine: Engine = H100_8B
    replicas: int = 1
    cold_start_s: float = 60.0
    prompt: float = 1000.0
    generated: float = 200.0
    tiers: tuple[float, float, float] = (0.0, 1.0, 0.0)
    prometheus: bool = True
    metrics: Callable[[float], bool] = always
    direct: Callable[[float], bool] = never
    puts: Callable[[float], bool] = always
    pods_come: Callable[[float], bool] = always
    slowness: Callable[[float], float] = as_modelled
    seed: int = 1
    slice_s: float = 0.25


@dataclass(frozen=True, slots=True)
class Tick:
    """A row of the record."""

    time: float
    rate: float
    replicas: int
    ready: int
    queue_wait_s: float
    batch_time_s: float
    sequences: int
    tokens: int
    waiting: int
    decision: ControlDecision


@dataclass
class Record:
    """The result of a scenario."""

    ticks: list[Tick] = field(default_factory=list)
    arrived: int = 0
    refused: int = 0
    finished: int = 0
    waits_within: float = 0.0
    waits: float = 0.0
    replica_hours: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)

    @property
    def wait_attainment(self) -> float:
        """The share of scheduled requests with a queue wait within the objective."""
        return self.waits_within / self.waits if self.waits else 1.0

    @property
    def most_replicas(self) -> int:
        """The highest allocation."""
        return max(tick.replicas for tick in self.ticks)

    def replica_changes(self) -> list[tuple[float, int]]:
        """Return (time, difference) of every change of the allocation."""
        pairs = zip(self.ticks, self.ticks[1:], strict=False)
        return [(b.time, b.replicas - a.replicas) for a, b in pairs if b.replicas != a.replicas]


@dataclass
class Fleet:
    """The modeled cluster: engines by pod name, starting and draining pods, and the allocation."""

    scenario: Scenario
    random: Random
    pods: dict[str, EnginePod] = field(default_factory=dict)
    created: dict[str, float] = field(default_factory=dict)
    ready_since: dict[str, float] = field(default_factory=dict)
    draining: dict[str, EnginePod] = field(default_factory=dict)
    number: int = 0
    allocated: int = 0
    gone: list[EnginePod] = field(default_factory=list)

    def create(self, now: float, *, ready: bool = False) -> None:
        """Create a pod; with `ready` it is ready at once, as at the start of a scenario."""
        name = f"chat-{self.number}"
        self.number += 1
        self.created[name] = now
        if ready:
            self._start(name, now - 600.0)
            self.created[name] = now - 600.0 - self.scenario.cold_start_s

    def _start(self, name: str, now: float) -> None:
        self.ready_since[name] = now
        self.pods[name] = EnginePod(self.scenario.engine, name, now)

    def move(self, now: float) -> None:
        """Make pods ready, remove drained pods, and create or remove pods up to the allocation."""
        since = now - EPOCH_S
        for name, made in self.created.items():
            cold = now - made >= self.scenario.cold_start_s and name not in self.pods
            if cold and self.scenario.pods_come(since):
                self._start(name, now)
        self.gone += [pod for pod in self.draining.values() if not pod.running]
        self.draining = {name: pod for name, pod in self.draining.items() if pod.running}
        while len(self.created) < self.allocated:
            self.create(now)
        if len(self.created) > self.allocated:
            self._remove(len(self.created) - self.allocated)

    def _remove(self, count: int) -> None:
        running = [(name, float(pod.running)) for name, pod in self.pods.items()]
        for name in emptiest(self.views(), running, count):
            del self.created[name]
            self.ready_since.pop(name, None)
            pod = self.pods.pop(name, None)
            if pod is None:
                continue
            for queue in pod.queues:
                self._hand_over(queue)
            self.draining[name] = pod

    def _hand_over(self, queue: deque[Request]) -> None:
        """Move the waiting requests of a removed pod to another pod, as the router does."""
        while queue:
            request = queue.popleft()
            others = list(self.pods.values())
            if not others:
                return
            others[0].queues[request.tier].append(request)

    def views(self) -> tuple[PodView, ...]:
        """Return the pods as the watch cache would show them."""
        return tuple(
            PodView(
                name,
                f"uid-{name}",
                made,
                ready=name in self.pods,
                ready_since=self.ready_since.get(name),
                ip="127.0.0.1",
            )
            for name, made in self.created.items()
        )

    def route(self) -> EnginePod | None:
        """Return the less loaded of two random replicas, or None without replicas."""
        if not self.pods:
            return None
        names = list(self.pods)
        first, second = self.random.choice(names), self.random.choice(names)
        return min((self.pods[first], self.pods[second]), key=_load)


def _load(pod: EnginePod) -> int:
    return pod.running + sum(len(queue) for queue in pod.queues)


def _poisson(random: Random, mean: float) -> int:
    """Return a Poisson number (Knuth's method, or the normal approximation for means above 30)."""
    if mean <= 0:
        return 0
    if mean > 30:
        return max(0, round(random.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), random.random(), 0
    while product > limit:
        product *= random.random()
        count += 1
    return count


def _arrivals(fleet: Fleet, record: Record, now: float) -> None:
    scenario, random = fleet.scenario, fleet.random
    rate = scenario.rate(now - EPOCH_S)
    for _ in range(_poisson(random, rate * scenario.slice_s)):
        tier = random.choices((0, 1, 2), scenario.tiers)[0]
        prompt = max(1.0, random.expovariate(1 / scenario.prompt))
        generated = max(1.0, random.expovariate(1 / scenario.generated))
        request = Request(now, tier, min(prompt, 8 * scenario.prompt), generated)
        pod = fleet.route()
        record.arrived += 1
        if pod is None or not pod.arrive(request, random.random()):
            record.refused += 1


def _samples(fleet: Fleet, now: float) -> tuple[PodSample, ...]:
    """Return the samples of this tick: from Prometheus, else read directly, else none."""
    since = now - EPOCH_S
    if fleet.scenario.prometheus and fleet.scenario.metrics(since):
        return tuple(pod.sample(now) for pod in fleet.pods.values())
    if fleet.scenario.direct(since):
        rows = (pod.sample(now) for pod in fleet.pods.values())
        return tuple(
            PodSample(r.pod, r.time, r.counters, r.gauges, r.decode, r.prefill, Source.DIRECT)
            for r in rows
        )
    return ()


def _carry_out(fleet: Fleet, puts: tuple[LimitsRequest, ...], now: float) -> tuple[PutOutcome, ...]:
    taken = fleet.scenario.puts(now - EPOCH_S)
    outcomes = []
    for put in puts:
        pod = fleet.pods.get(put.pod)
        if pod is not None and taken:
            pod.limit_sequences = put.limits.sequences
            pod.limit_tokens = put.limits.tokens
            pod.admit = put.admission.admit
            pod.generation = float(put.generation)
        outcomes.append(PutOutcome(put.pod, put.generation, pod is not None and taken))
    return tuple(outcomes)


def run(scenario: Scenario, tick_s: float = 5.0) -> Record:
    """Run a scenario. The same scenario gives the same record."""
    fleet, record = Fleet(scenario, Random(scenario.seed)), Record()  # noqa: S311 - seeded on purpose
    now = EPOCH_S
    for _ in range(scenario.replicas):
        fleet.create(now, ready=True)
    fleet.allocated = scenario.replicas
    state = _LoopState()
    next_tick = now
    end = now + scenario.seconds
    while now < end:
        fleet.move(now)
        if now >= next_tick:
            next_tick += tick_s
            _tick(fleet, record, state, now)
        _arrivals(fleet, record, now)
        for pod in (*fleet.pods.values(), *fleet.draining.values()):
            pod.slowness = scenario.slowness(now - EPOCH_S)
            pod.advance(now, scenario.slice_s)
        record.replica_hours += len(fleet.created) * scenario.slice_s / 3600
        now += scenario.slice_s
    _totals(fleet, record)
    return record


@dataclass
class _LoopState:
    """The state that the runtime keeps from tick to tick."""

    memory: ControlMemory = field(default_factory=ControlMemory)
    outcomes: tuple[PutOutcome, ...] = ()
    allocated: int | None = None


def _tick(fleet: Fleet, record: Record, state: _LoopState, now: float) -> None:
    scenario = fleet.scenario
    inputs = ControlInputs(
        namespace="team-a",
        name="chat",
        settings=scenario.settings,
        replicas=fleet.allocated,
        started=EPOCH_S,
        pods=fleet.views(),
        samples=_samples(fleet, now),
        allocated_replicas=state.allocated,
        put_outcomes=state.outcomes,
        prometheus_lost=scenario.prometheus and not scenario.metrics(now - EPOCH_S),
    )
    decision, memory = decide_service(inputs, state.memory, now)
    allocations = arbitrate([decision.want], Budget())
    result, state.memory = build_report(decision, allocations[decision.want.key], memory, now)
    if result.allocation is not None:
        fleet.allocated = result.allocation.replicas
    state.allocated = fleet.allocated
    state.outcomes = _carry_out(fleet, decision.puts, now)
    record.events += [(now - EPOCH_S, event.message) for event in result.events]
    record.ticks.append(_row(fleet, decision, now))


def _row(fleet: Fleet, decision: ControlDecision, now: float) -> Tick:
    signals = decision.signals
    return Tick(
        now - EPOCH_S,
        fleet.scenario.rate(now - EPOCH_S),
        fleet.allocated,
        len(fleet.pods),
        signals.queue_wait_s,
        signals.batch_time_s,
        decision.in_force.sequences,
        decision.in_force.tokens,
        sum(len(queue) for pod in fleet.pods.values() for queue in pod.queues),
        decision,
    )


def _totals(fleet: Fleet, record: Record) -> None:
    for pod in (*fleet.pods.values(), *fleet.draining.values(), *fleet.gone):
        counters: Mapping[str, float] = pod.sample(0.0).counters._asdict()
        record.finished += pod.finished
        for tier in ("realtime", "standard", "batch"):
            record.waits += counters[f"wait_count_{tier}"]
            record.waits_within += counters[f"wait_within_{tier}"]
