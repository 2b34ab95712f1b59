"""Autoscalers of a simulation, which set limits and replicas: the shipped control loop, or an alternative.

The alternatives see exact, current values, and stock engines: no tiers, no admission, start-up limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import process_time
from typing import Final, Protocol

from fleetkeeper.api.conditions import Reason
from fleetkeeper.autoscale.arbitrate import Allocation, Want
from fleetkeeper.autoscale.constants import FRESH_S, TICK_S
from fleetkeeper.autoscale.decided import Decided, decisions_made
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, PutOutcome
from fleetkeeper.common.budget import ServiceKey
from fleetkeeper.common.values import Event
from fleetkeeper.simulate.cluster import Cluster
from fleetkeeper.simulate.engine import Engine

BUDGET: Final = "budget"
"""The subject of a decision about which only the GPU budget had a say."""
HPA_SYNC_S: Final = 15.0
HPA_TOLERANCE: Final = 0.1
HPA_STABILIZATION_S: Final = 300.0
HPA_UP_PODS: Final = 4
"""Kubernetes' defaults: every 15 s; up by the larger of 4 pods and 100%; down to the highest
recommendation of 5 minutes; no change within 10% of the target."""


Asked = tuple[Want, Callable[[Allocation], None]]
"""A recommendation, and what carries out its allocation."""


class Autoscaler(Protocol):
    """The deciding part of a simulation."""

    interval_s: float
    control_s: float
    """CPU seconds spent in decisions."""

    def tick(self, cluster: Cluster, now: float) -> Asked | None:
        """Observe the cluster and act on it. What depends on a GPU budget is returned, and then acted on."""


def always(_: float) -> bool:
    """Return True at any time."""
    return True


@dataclass
class ControlLoop:
    """The shipped control loop: `decide_service`, `arbitrate`, `build_report`, unchanged."""

    settings: ControlSettings
    prometheus: bool = True
    """True if Prometheus is configured."""
    metrics: Callable[[float], bool] = always
    """Returns whether Prometheus answers at a time."""
    direct: Callable[[float], bool] = always
    """Returns whether pods can be read directly at a time."""
    puts: Callable[[float], bool] = always
    """Returns whether engines accept limits at a time."""
    scrape_lag_s: float = 0.5
    """Age of a scrape when a query first returns it."""
    interval_s: float = TICK_S
    control_s: float = 0.0
    gpus: int = 1
    key: ServiceKey = ("default", "service")
    on_tick: Callable[[ControlInputs, ControlDecision], None] = lambda *_: None
    memory: ControlMemory = field(default_factory=ControlMemory)
    decision: ControlDecision | None = None
    events: list[tuple[float, Event]] = field(default_factory=list)
    decided: list[tuple[float, Decided]] = field(default_factory=list)
    _outcomes: tuple[PutOutcome, ...] = ()
    _allocated: int | None = None
    _started: float | None = None
    _answered: float = -math.inf
    _asks_pods: bool = False

    def tick(self, cluster: Cluster, now: float) -> Asked:
        """Decide once. With the allocation, send the limits and set the replicas."""
        self._started = now if self._started is None else self._started
        cluster.scrapes = self.prometheus
        samples, is_lost = self._observe(cluster, now)
        inputs = ControlInputs(
            namespace=self.key[0],
            name=self.key[1],
            settings=self.settings,
            replicas=cluster.wanted,
            started=self._started,
            pods=cluster.views(),
            samples=samples,
            allocated_replicas=self._allocated,
            put_outcomes=self._outcomes,
            prometheus_lost=is_lost,
            checks_directly=self.prometheus and self.direct(now) and not is_lost,
            gpus_per_replica=self.gpus,
            backlog=cluster.backlog if self.prometheus and self.metrics(now) else None,
        )
        began = process_time()
        before = self.memory
        decision, self.memory = decide_service(inputs, before, now)
        self.control_s += process_time() - began
        self.decision, self._asks_pods = decision, decision.asks_pods
        self.on_tick(inputs, decision)
        return decision.want, partial(self._act, cluster, now, decision, before)

    def _act(
        self,
        cluster: Cluster,
        now: float,
        decision: ControlDecision,
        before: ControlMemory,
        allocation: Allocation,
    ) -> None:
        began = process_time()
        result, self.memory = build_report(decision, allocation, self.memory, now)
        self.control_s += process_time() - began
        self.events += [(now, event) for event in result.events]
        self.decided += [
            (now, each)
            for each in (
                *_limited(decision.want, before.allocation, allocation),
                *decisions_made(decision, before, self.memory),
            )
        ]
        if result.allocation is not None:
            cluster.scale(result.allocation.replicas, now)
            self._allocated = result.allocation.replicas
        self._outcomes = cluster.put_limits(decision.puts, now, accepted=self.puts(now))

    def _observe(self, cluster: Cluster, now: float) -> tuple[tuple[PodSample, ...], bool]:
        """Return the samples of this tick, and whether Prometheus is lost, as the operator finds them."""
        if not self.prometheus:
            return (cluster.read_directly(now) if self.direct(now) else ()), False
        rows: tuple[PodSample, ...] = ()
        if self.metrics(now):
            self._answered = now
            rows = cluster.samples(now, self.scrape_lag_s)
        is_lost = now - self._answered > FRESH_S and bool(cluster.pods)
        if self.direct(now) and (self._asks_pods or is_lost or not rows):
            return cluster.read_directly(now), is_lost
        return rows, is_lost


def _limited(want: Want, before: Allocation | None, allocation: Allocation) -> Iterator[Decided]:
    """Yield a decision when the GPU budget begins to limit a service."""
    if allocation.limited_by and not (before and before.limited_by):
        asked, allowed = str(want.replicas), str(allocation.replicas)
        why = f"{allocation.limited_by} allows {allowed} of {asked} replicas"
        yield Decided(BUDGET, asked, allowed, str(Reason.GPU_BUDGET), why[0].upper() + why[1:], "")


@dataclass
class Hpa:
    """A HorizontalPodAutoscaler (or KEDA) on a sum over pods: concurrency or waiting requests per replica.

    desired = ceil(sum / target), as for an external metric with an average value.
    """

    measure: Callable[[Cluster, float], float]
    target: float
    min_replicas: int
    max_replicas: int
    interval_s: float = HPA_SYNC_S
    control_s: float = 0.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def tick(self, cluster: Cluster, now: float) -> None:
        """Sync once, as kube-controller-manager does."""
        current = max(1, cluster.wanted)
        ratio = self.measure(cluster, now) / (self.target * current)
        desired = current
        if abs(ratio - 1.0) > HPA_TOLERANCE:
            desired = math.ceil(ratio * current - 1e-9)
        self._wanted.append((now, desired))
        while self._wanted and now - self._wanted[0][0] > HPA_STABILIZATION_S:
            self._wanted.popleft()
        if desired < current:
            desired = min(current, max(count for _, count in self._wanted))
        desired = min(desired, max(2 * current, current + HPA_UP_PODS))
        cluster.scale(min(self.max_replicas, max(self.min_replicas, desired)), now)


def concurrency(cluster: Cluster, now: float) -> float:
    """Return the requests in all engines, running or waiting."""
    return float(sum(engine.load for engine in _current(cluster, now)))


def waiting(cluster: Cluster, now: float) -> float:
    """Return the waiting requests of all engines."""
    return float(sum(engine.waiting for engine in _current(cluster, now)))


def _current(cluster: Cluster, now: float) -> list[Engine]:
    for pod in cluster.pods.values():
        cluster.advance(pod, now)
    return [pod.engine for pod in cluster.pods.values() if pod.engine is not None]


@dataclass
class Static:
    """A fixed number of replicas."""

    interval_s: float = 60.0
    control_s: float = 0.0

    def tick(self, cluster: Cluster, now: float) -> None:
        """Change nothing."""
