"""The time line of a run: a wrapper that lets an autoscaler decide and records what the engines did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from fleetkeeper.api.status_enums import BreakerState, Subject
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import TICK_S
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.autoscalers import BUDGET, Asked, Autoscaler, ControlLoop
from fleetkeeper.simulate.closed_loop import EPOCH_S
from fleetkeeper.simulate.cluster import Cluster
from fleetkeeper_contract.tiers import TIER_LABELS

MOMENTS: Final = 360
"""The most rows of a time line."""
MIN_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A row of the time line: what was at `time_s`, and the means since the row before. NaN: unknown."""

    time_s: float
    requests_per_s: float
    replicas: int
    ready: int
    running: int
    waiting: int
    queue_wait_s: float
    batch_time_s: float
    limit_sequences: float
    limit_tokens: float

    def as_json(self) -> dict[str, Any]:
        """Return the row with null for what is unknown."""
        return {
            key: None if value != value else round(value, 6)  # noqa: PLR0124 - NaN is not itself
            for key, value in asdict(self).items()
        }


class DecisionMade(NamedTuple):
    """A change of the replicas, a limit by the GPU budget, or the opening of a breaker, and why."""

    time_s: float
    subject: str
    """replicas, budget or breaker."""
    before: str
    after: str
    """Replicas (of budget: asked and allowed), or a breaker and its state, for example `control Open`."""
    reason: str
    message: str

    def as_json(self) -> dict[str, Any]:
        """Return the decision for programs."""
        names = ("time_s", "subject", "from", "to", "reason", "message")
        return dict(zip(names, self, strict=True))


def moment_s(seconds: float) -> float:
    """Return the time between two rows: a multiple of 15 s that gives at most 360 rows."""
    return MIN_S * max(1, math.ceil(seconds / MIN_S / MOMENTS))


@dataclass
class Recorder:
    """An autoscaler that records the decisions of another."""

    inner: Autoscaler
    every_s: float
    drain_s: float
    """Maximum drain of a replica."""
    has_metrics: Callable[[float], bool]
    """Returns whether there are metrics at a time. Without metrics, an HPA changes nothing."""
    interval_s: float = TICK_S
    control_s: float = 0.0
    tiers: Sequence[str] = TIER_LABELS
    """Tiers whose requests and waits a row contains."""
    added: int = 0
    """Replicas that were added for the deadline of a backlog."""
    moments: list[Moment] = field(default_factory=list)
    _inner_at: float = -math.inf
    _row_at: float = -math.inf
    _before: Counters = field(default_factory=Counters)
    _arrived: int = 0

    def tick(self, cluster: Cluster, now: float) -> Asked | None:
        """Let the autoscaler decide if it is due, and record a row if one is due."""
        cluster.drain_s = self.drain_s
        asked = None
        if now >= self._inner_at:
            self._inner_at = now + self.inner.interval_s
            if isinstance(self.inner, ControlLoop) or self.has_metrics(now - EPOCH_S):
                asked = self.inner.tick(cluster, now)
        if asked is None:
            self._ticked(cluster, now)
            return None
        want, act = asked

        def acted(allocation: Allocation) -> None:
            before = cluster.wanted
            act(allocation)
            if is_for_deadline(self.inner):
                self.added += max(0, cluster.wanted - before)
            self._ticked(cluster, now)

        return want, acted

    def _ticked(self, cluster: Cluster, now: float) -> None:
        self.control_s = self.inner.control_s
        if now >= self._row_at:
            self._row_at = now + self.every_s
            self._record(cluster, now)

    @property
    def decided(self) -> tuple[DecisionMade, ...]:
        """The changes of the replicas, what limited them, and the openings of breakers; empty for other autoscalers."""
        made = self.inner.decided if isinstance(self.inner, ControlLoop) else ()
        return tuple(
            DecisionMade(
                now - EPOCH_S, str(each.subject), each.before, each.after, each.reason, each.why
            )
            for now, each in made
            if each.subject in {Subject.REPLICAS, BUDGET}
            or each.after.endswith(f" {BreakerState.OPEN}")
        )

    def _record(self, cluster: Cluster, now: float) -> None:
        ready = [pod for pod in cluster.pods.values() if pod.engine is not None]
        for pod in ready:
            cluster.advance(pod, now)
        engines = [pod.engine for pod in ready if pod.engine is not None]
        rows = [engine.counts.counters for engine in cluster.engines()]
        total = Counters._make([sum(column) for column in zip(*rows, strict=True)] or Counters())
        delta = Counters._make(a - b for a, b in zip(total, self._before, strict=True))
        self._before = total
        # Engines count a request that is sent to several of them several times.
        pairs = zip(TIER_LABELS, cluster.arrived, strict=True)
        arrived = sum([count for tier, count in pairs if tier in self.tiers])
        before, self._arrived = self._arrived, arrived
        waits = _sum_of(delta, "wait_count", self.tiers)
        steps = delta.batch_time_count
        self.moments.append(
            Moment(
                time_s=now - EPOCH_S,
                requests_per_s=(arrived - before) / self.every_s,
                replicas=cluster.wanted,
                ready=len(engines),
                running=sum([engine.running for engine in engines]),
                waiting=sum([engine.waiting for engine in engines]),
                queue_wait_s=_sum_of(delta, "wait_sum_s", self.tiers) / waits
                if waits
                else math.nan,
                batch_time_s=delta.batch_time_sum_s / steps if steps else math.nan,
                limit_sequences=_mean([engine.limit_sequences for engine in engines]),
                limit_tokens=_mean([engine.limit_tokens for engine in engines]),
            )
        )


def is_for_deadline(autoscaler: Autoscaler) -> bool:
    """Return whether the last tick of the control loop was decided by the deadline of a backlog."""
    decision = autoscaler.decision if isinstance(autoscaler, ControlLoop) else None
    return decision is not None and decision.replicas.reason == BATCH_DEADLINE


def _sum_of(counters: Counters, prefix: str, tiers: Sequence[str]) -> float:
    return float(sum([getattr(counters, f"{prefix}_{tier}") for tier in tiers]))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else math.nan
