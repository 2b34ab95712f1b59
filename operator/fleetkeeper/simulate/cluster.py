"""The simulated cluster: pods that start, serve, drain, crash and end, and the router before them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request

SCRAPE_S: Final = 5.0
"""Prometheus' scrape interval, as the chart sets it."""
SCRAPES_KEPT: Final = 8
"""Scrapes of a pod that a query may still want: the lag is shorter than 35 s."""
READY_BEFORE_S: Final = 600.0
"""Pods that exist at the start have been ready for this long."""
CHOICES: Final = 3
"""A router takes the least loaded of so many pods. It may draw a pod more than once."""
TRIES: Final = 4
"""A router sends a request to at most so many pods, as long as their queues are full."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The time from a pod's creation to ready: lognormal, with a tail (seconds, ratios).

    The defaults without spread make a constant. `tail_ratio` of the starts take `tail_factor` times as
    long (an image or weights that are not cached).
    """

    median_s: float = 75.0
    sigma: float = 0.0
    tail_ratio: float = 0.0
    tail_factor: float = 3.0

    def draw(self, random: Random) -> float:
        """Return the seconds of one start."""
        took_s = self.median_s * math.exp(self.sigma * random.gauss(0.0, 1.0))
        return took_s * (self.tail_factor if random.random() < self.tail_ratio else 1.0)


@dataclass(slots=True)
class SimulatedPod:
    """A pod."""

    name: str
    created: float
    ready_at: float
    """Time at which it becomes ready (infinite while no GPU is free)."""
    phase_s: float
    """Offset of its scrapes."""
    engine: Engine | None = None
    """Its engine once it is ready."""
    ready_since: float | None = None
    removed_at: float | None = None
    under_way: list[int] = field(default_factory=list)
    """Requests inside its engine, by the router pod that sent them."""
    scraped: deque[PodSample] = field(default_factory=lambda: deque(maxlen=SCRAPES_KEPT))
    """Its last scrapes."""
    scrape_at: float = math.inf
    """Time of its next scrape."""


@dataclass
class Cluster:
    """The pods of one service. All times are seconds; calls come in the order of time."""

    spec: EngineSpec
    random: Random
    cold_start: ColdStart = ColdStart()
    gpus: int = 1
    """Accelerators of a pod."""
    routers: int = 2
    """Number of router pods."""
    discovery_s: float = 1.0
    """Time until routers know that a pod is ready, or that it drains."""
    drain_s: float = 300.0
    """Maximum drain."""
    removes_emptiest: bool = True
    scrapes: bool = False
    """True if Prometheus scrapes the pods."""
    pods_come: Callable[[float], bool] = lambda _: True
    """Returns whether a pod that is due becomes ready now (GPUs are free)."""
    slowness: Callable[[float], float] = lambda _: 1.0
    on_end: Callable[[Iterable[Request]], None] = lambda _: None
    on_lost: Callable[[Iterable[Request]], None] = lambda _: None
    pods: dict[str, SimulatedPod] = field(default_factory=dict)
    draining: list[SimulatedPod] = field(default_factory=list)
    retired: list[Engine] = field(default_factory=list)
    wanted: int = 0
    pod_s: float = 0.0
    backlog: Backlog | None = None
    """The backlog that the batch process exports."""
    arrived: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Requests by tier, each counted once."""
    _number: int = 0

    # -- pods ---------------------------------------------------------------------------------------

    def create(self, now: float, *, ready: bool = False) -> None:
        """Create a pod; with `ready` it has been ready for a while, as at the start."""
        name = f"sim-{self._number}"
        self._number += 1
        start_s = self.cold_start.draw(self.random)
        phase_s = self.random.uniform(0.0, SCRAPE_S)
        pod = SimulatedPod(name, now, now + start_s, phase_s)
        self.pods[name] = pod
        if ready:
            self._begin(pod, now)
            pod.ready_since = now - READY_BEFORE_S
            pod.created = pod.ready_since - start_s

    def _begin(self, pod: SimulatedPod, now: float) -> None:
        pod.engine = Engine(self.spec, pod.name, now)
        pod.engine.slowness = self.slowness(now)
        pod.ready_since = now
        pod.under_way = [0] * self.routers
        pod.scrape_at = now + (pod.phase_s - now) % SCRAPE_S

    def scale(self, replicas: int, now: float) -> None:
        """Set the replicas of the Deployment: create pods, or drain those with the least load."""
        self.wanted = replicas
        while len(self.pods) < replicas:
            self.create(now)
        if len(self.pods) > replicas:
            running = self._running(now) if self.removes_emptiest else []
            for name in emptiest(self.views(), running, len(self.pods) - replicas):
                pod = self.pods.pop(name)
                pod.removed_at = now
                self.draining.append(pod)

    def _running(self, now: float) -> list[tuple[str, float]]:
        """Return the requests in each pod's engine, whichever router sent them."""
        rows = []
        for pod in self.pods.values():
            self.advance(pod, now)
            rows.append((pod.name, float(pod.engine.load if pod.engine else 0)))
        return rows

    def move(self, now: float) -> None:
        """Make pods ready that are due, and end drained ones."""
        for pod in self.pods.values():
            if pod.engine is None and now >= pod.ready_at and self.pods_come(now):
                self._begin(pod, now)
            elif pod.engine is not None and pod.engine.slowness != self.slowness(now):
                self.advance(pod, now)
                pod.engine.slowness = self.slowness(now)
        still = []
        for pod in self.draining:
            if pod.engine is not None and not pod.engine.is_idle:
                self.advance(pod, now)
                if not pod.engine.is_idle and now - (pod.removed_at or now) < self.drain_s:
                    still.append(pod)
                    continue
            self._retire(pod, now)
        self.draining = still

    def _retire(self, pod: SimulatedPod, now: float) -> None:
        ended = now
        if pod.engine is not None:
            self.on_lost(pod.engine.abort_all())
            self.retired.append(pod.engine)
            ended = min(now, max(pod.engine.time, pod.removed_at or now))
        self._bill(pod, ended)

    def _bill(self, pod: SimulatedPod, until: float) -> None:
        start = max(pod.created, self._from)
        self.pod_s += max(0.0, until - start)

    _from: float = 0.0

    def begin(self, now: float, replicas: int) -> None:
        """Start with so many ready replicas; time is billed from here."""
        self._from = now
        self.wanted = replicas
        for _ in range(replicas):
            self.create(now, ready=True)

    def finish(self, now: float) -> None:
        """Bill every pod until `now`, and hand over what ended."""
        for pod in (*self.pods.values(), *self.draining):
            self.advance(pod, now)
            self._bill(pod, now)

    def crash(self, number: int, now: float) -> None:
        """End the engine of a ready pod: its requests are lost, and its container starts again."""
        ready = [(pod, pod.engine) for pod in self.pods.values() if pod.engine is not None]
        if not ready:
            return
        pod, engine = ready[number % len(ready)]
        self.advance(pod, now)
        self.on_lost(engine.abort_all())
        self.retired.append(engine)
        pod.engine, pod.ready_since = None, None
        pod.scraped.clear()
        pod.ready_at = now + self.cold_start.draw(self.random)

    def engines(self) -> list[Engine]:
        """Return the engines of all pods, also of drained and crashed ones."""
        living = (*self.pods.values(), *self.draining)
        return [pod.engine for pod in living if pod.engine is not None] + self.retired

    def views(self) -> tuple[PodView, ...]:
        """Return the pods as the operator's cache shows them."""
        rows = [*self.pods.values(), *self.draining]
        return tuple(
            PodView(
                pod.name,
                f"uid-{pod.name}",
                pod.created,
                ready=pod.engine is not None,
                ready_since=pod.ready_since,
                deleting=pod.removed_at is not None,
                ip="127.0.0.1",
            )
            for pod in rows
        )

    # -- requests -----------------------------------------------------------------------------------

    def advance(self, pod: SimulatedPod, now: float) -> None:
        """Advance a pod's engine, scrape it on the way, and hand over the requests that ended.

        A scrape sees the engine at its own time: requests that arrive later are not in it.
        """
        engine = pod.engine
        if engine is None:
            return
        while self.scrapes and pod.scrape_at <= now:
            engine.advance(pod.scrape_at)
            pod.scraped.append(engine.sample(pod.scrape_at))
            pod.scrape_at += SCRAPE_S
        engine.advance(now)
        if engine.ended:
            ended = engine.take_ended()
            for request in ended:
                pod.under_way[request.router] -= 1
            self.on_end(ended)

    def route(self, request: Request) -> bool:
        """Send a request through a random router; return False if it is refused, or if no pod is known.

        The router sends a request that finds a full queue to another pod, at the same time here and within
        70 ms by Envoy. Where the tier is shed, the engine's answer forbids another try.
        """
        now, random = request.arrived, self.random.random
        self.arrived[request.tier] += 1
        request.router = int(random() * self.routers)
        known = untried = self._known(now)
        if not known:
            return False
        for _ in range(min(TRIES, len(known))):
            pod = self._least_loaded(untried, request.router, now)
            engine, draw = pod.engine, random()
            if engine is not None and engine.arrive(request, draw):
                pod.under_way[request.router] += 1
                return True
            tier = request.tier
            if engine is None or draw >= engine.admit[tier] or not engine.is_full(tier):
                return False
            untried = [other for other in untried if other is not pod]
        return False

    def _known(self, now: float) -> list[SimulatedPod]:
        """Return the pods to which routers send requests now: they learn of a change with a delay."""
        seen = now - self.discovery_s
        return [
            pod
            for pod in (*self.pods.values(), *self.draining)
            if pod.ready_since is not None
            and pod.ready_since <= seen
            and (pod.removed_at is None or pod.removed_at > seen)
        ]

    def _least_loaded(self, pods: list[SimulatedPod], router: int, now: float) -> SimulatedPod:
        """Return the pod that Envoy's LEAST_REQUEST chooses.

        Envoy draws with replacement, and counts the requests that it sent itself. The pod drawn first
        stays unless another one has fewer.
        """
        found, fewest = pods[0], math.inf
        for _ in range(CHOICES):
            pod = pods[int(self.random.random() * len(pods))]
            self.advance(pod, now)
            if pod.under_way[router] < fewest:
                found, fewest = pod, pod.under_way[router]
        return found

    # -- what the operator reads and writes -----------------------------------------------------------

    def samples(self, now: float, lag_s: float = 0.0) -> tuple[PodSample, ...]:
        """Return the newest scrape of each pod that is at least `lag_s` old at `now`."""
        rows = []
        for pod in self.pods.values():
            self.advance(pod, now - lag_s)
            known = [row for row in pod.scraped if row.time <= now - lag_s]
            rows += known[-1:]
        return tuple(rows)

    def read_directly(self, now: float) -> tuple[PodSample, ...]:
        """Read every ready pod itself."""
        rows = []
        for pod in self.pods.values():
            if pod.engine is not None:
                self.advance(pod, now)
                rows.append(pod.engine.sample(now, Source.DIRECT))
        return tuple(rows)

    def put_limits(
        self, requests: Iterable[LimitsRequest], now: float, *, accepted: bool
    ) -> tuple[PutOutcome, ...]:
        """Carry out limits requests, or refuse them all. Steps that began before keep their limits."""
        outcomes = []
        for put in requests:
            pod = self.pods.get(put.pod)
            engine = pod.engine if pod is not None else None
            if pod is not None and engine is not None and accepted:
                self.advance(pod, now)
                engine.limit_sequences = put.limits.sequences
                engine.limit_tokens = put.limits.tokens
                engine.admit = put.admission.admit
                engine.batch_share = put.admission.batch_share
                engine.generation = float(put.generation)
            outcomes.append(PutOutcome(put.pod, put.generation, engine is not None and accepted))
        return tuple(outcomes)


def emptiest(
    pods: Sequence[PodView], running: Sequence[tuple[str, float]], count: int
) -> tuple[str, ...]:
    """Return the pods to remove first: not ready ones, then those that run least, then the newest."""
    load = dict(running)
    left = [pod for pod in pods if not pod.deleting]
    left.sort(key=lambda pod: (pod.ready, load.get(pod.name, 0.0), -pod.created, pod.name))
    return tuple(pod.name for pod in left[: max(0, count)])
