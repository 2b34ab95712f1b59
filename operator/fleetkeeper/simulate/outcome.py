"""The outcome of a simulation for users and for the bill."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.batch_client import BatchWork
from fleetkeeper.simulate.cluster import Cluster
from fleetkeeper.simulate.loads.arrivals import StockRequest
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.tiers import TIER_LABELS


class Targets(NamedTuple):
    """Targets of a good request: the first token, and the mean time per token after it, in seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Tick:
    """A row of the time line. Unknown values are NaN."""

    time: float
    replicas: int
    ready: int
    arrived: int
    """Requests so far."""
    waiting: int
    queue_wait_s: float
    batch_time_s: float
    sequences: int
    tokens: int
    decision: ControlDecision | None = None


@dataclass
class TierOutcome:
    """The requests of one tier."""

    arrived: int = 0
    refused: int = 0
    """Requests that got 429, or that found no ready pod."""
    lost: int = 0
    """Requests inside an engine that ended."""
    finished: int = 0
    good: int = 0
    """Requests within both targets."""
    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    tpot_s: array[float] = field(default_factory=lambda: array("f"))

    @property
    def attainment(self) -> float:
        """The share of the arrived requests that were answered within both targets."""
        return self.good / self.arrived if self.arrived else 1.0


@dataclass
class Outcome:
    """The result of a scenario."""

    targets: Targets = field(default_factory=Targets)
    tiers: tuple[TierOutcome, TierOutcome, TierOutcome] = field(
        default_factory=lambda: (TierOutcome(), TierOutcome(), TierOutcome())
    )
    ticks: list[Tick] = field(default_factory=list)
    arrivals: int = 0
    unfinished: int = 0
    """Requests that were not finished by the end."""
    generated: int = 0
    seconds: float = 0.0
    replica_hours: float = 0.0
    """Sum over replicas of the time from creation to removal."""
    gpu_hours: float = 0.0
    """`replica_hours` times the GPUs of a replica."""
    wait_attainment: float = 1.0
    batch_attainment: float = 1.0
    preemptions: float = 0.0
    engine_s: float = 0.0
    """CPU seconds of the engine model."""
    control_s: float = 0.0
    """CPU seconds of the control code."""
    works: Sequence[BatchWork] = ()
    """Batches, whose lines do not count as requests here. With batches, queue waits of tier batch
    count neither as attained nor as missed."""

    # -- what the cluster reports -------------------------------------------------------------------

    def _tier_of(self, request: Request) -> TierOutcome:
        asked = request.asked if isinstance(request, StockRequest) else request.tier
        return self.tiers[asked]

    def arrived(self, request: Request) -> None:
        """Count an arrival."""
        self.arrivals += 1
        self._tier_of(request).arrived += 1

    def refused(self, request: Request) -> None:
        """Count a refusal."""
        self._tier_of(request).refused += 1

    def lost_all(self, requests: Iterable[Request]) -> None:
        """Count requests of an engine that ended."""
        for request in requests:
            self._tier_of(request).lost += 1

    def ended(self, requests: Iterable[Request]) -> None:
        """Count requests that were answered in full."""
        ttft_s, tpot_s = self.targets
        for request in requests:
            tier = self._tier_of(request)
            tier.finished += 1
            first_s, each_s = request.ttft_s, request.tpot_s
            tier.good += first_s <= ttft_s and each_s <= tpot_s
            tier.ttft_s.append(first_s)
            tier.tpot_s.append(each_s)
            self.generated += request.generated

    def close(self, cluster: Cluster, start: float, seconds: float, tail_s: float) -> None:
        """Let the requests in the engines end, and add up what the engines counted."""
        self.seconds = seconds
        self.replica_hours = cluster.pod_s / 3600.0
        self.gpu_hours = self.replica_hours * cluster.gpus
        end = start + seconds + tail_s
        for pod in (*cluster.pods.values(), *cluster.draining):
            if pod.engine is not None:
                cluster.advance(pod, end)
                self.unfinished += pod.engine.load
        total = [sum(column) for column in zip(*_counters(cluster), strict=True)]
        counters = Counters._make(total) if total else Counters()
        judged = TIER_LABELS[:2] if self.works else TIER_LABELS
        waits = sum([getattr(counters, f"wait_count_{tier}") for tier in judged])
        within = sum([getattr(counters, f"wait_within_{tier}") for tier in judged])
        self.wait_attainment = within / waits if waits else 1.0
        steps = counters.batch_time_count
        self.batch_attainment = counters.batch_time_within / steps if steps else 1.0
        self.preemptions = counters.preemptions

    # -- what a report shows ------------------------------------------------------------------------

    @property
    def total_refused(self) -> int:
        """The refused requests of all tiers."""
        return sum([tier.refused for tier in self.tiers])

    @property
    def total_lost(self) -> int:
        """The lost requests of all tiers."""
        return sum([tier.lost for tier in self.tiers])

    @property
    def finished(self) -> int:
        """The answered requests of all tiers."""
        return sum([tier.finished for tier in self.tiers])

    @property
    def attainment(self) -> float:
        """The share of all arrived requests that were answered within both targets: goodput / load."""
        return sum([tier.good for tier in self.tiers]) / self.arrivals if self.arrivals else 1.0

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that were answered within both targets."""
        return sum([tier.good for tier in self.tiers]) / self.seconds if self.seconds else 0.0

    @property
    def most_replicas(self) -> int:
        """The most replicas at any tick."""
        return max((tick.replicas for tick in self.ticks), default=0)

    def changes(self) -> list[int]:
        """Return the differences of every change of the replicas, in the order of time."""
        return [
            b.replicas - a.replicas for a, b in pairwise(self.ticks) if b.replicas != a.replicas
        ]

    def reversals(self) -> int:
        """Return how often the replicas changed direction."""
        return sum([(a > 0) != (b > 0) for a, b in pairwise(self.changes())])

    def ttft_quantiles_s(self, *points: float) -> tuple[float, ...]:
        """Return quantiles of the time to the first token, all tiers."""
        return quantiles([value for tier in self.tiers for value in tier.ttft_s], points)

    def tpot_quantiles_s(self, *points: float) -> tuple[float, ...]:
        """Return quantiles of the mean time per token of a request, all tiers."""
        return quantiles([value for tier in self.tiers for value in tier.tpot_s], points)


def quantiles(values: Sequence[float], points: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest-rank quantiles; NaN without values."""
    rows = sorted(values)
    if not rows:
        return tuple(float("nan") for _ in points)
    return tuple(rows[min(len(rows) - 1, int(point * len(rows)))] for point in points)


def _counters(cluster: Cluster) -> list[list[float]]:
    return [engine.counts.counters for engine in cluster.engines()]
