"""The values that reconcile and autoscale exchange, or that both produce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status
from fleetkeeper.api.status_enums import ReplicaStage

Manifest = dict[str, Any]
"""A complete Kubernetes object as a plain dict: deterministic and ready for server-side apply."""

CAUSE_UNKNOWN = "open before the restart"
"""The cause of a breaker that a new process found open, if the status does not explain it."""


@dataclass(frozen=True, slots=True)
class ReplicaAllocation:
    """The replicas that the arbitration over all services allocated to this one.

    `reason` is CamelCase from a closed set. `message` explains it with figures, for example "queue
    wait p95 1.9 s against 0.5 s, batch at its limit". Without an allocation the replicas stay
    unchanged.
    """

    replicas: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The stage of an engine's start that it reports itself, and since when."""

    stage: ReplicaStage
    since: float


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event for the InferenceService."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """The current replicas, their reason, and their start time.

    In mode Auto at most one limit is reported.
    """

    desired: int
    reason: str
    message: str
    since: float
    wanted: int | None = None
    """In Advisory mode, the recommendation."""
    budget: str = ""
    """The budget that allows only `desired` of the `recommended` replicas."""
    recommended: int | None = None
    blocked: str = ""
    """Reason why more replicas would not help."""
    exceeded_max: int | None = None
    """spec.scaling.maxReplicas, if the load is too high for it."""


@dataclass(frozen=True, slots=True)
class BatchingReport:
    """The limits in force, why, and since when; `applied_replicas` have confirmed them."""

    sequences: int
    tokens: int
    applied_replicas: int
    reason: str
    message: str
    since: float


@dataclass(frozen=True, slots=True)
class BreakerReport:
    """The state of each breaker (`load` by tier), and the latest reason with its time (0: none)."""

    control: str
    source: str
    load: Mapping[str, str]
    reason: str = ""
    message: str = ""
    since: float = 0.0

    @property
    def states(self) -> tuple[str, str, Mapping[str, str]]:
        """The states without the reason."""
        return self.control, self.source, self.load


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory cap, and the highest peak measured (0: none yet), in percent."""

    cap_percent: int
    peak_percent: int = 0
    over_cap_pod: str | None = None
    """The replica with a peak above the cap; "" without such a replica; None while this process has
    not measured yet."""
    own: bool = True
    """False if the memory of a replica includes that of other pods."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """The current remedy: start-up sequences and a memory cap that replace the spec's for a generation."""

    reason: str
    max_sequences: int
    cap_percent: int
    attempts: int
    generation: int
    since: float
    """Time of the last step. Only pods created after it count for the next step."""


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed something; the status keeps the last ten."""

    time: float
    what: str
    before: str
    after: str
    reason: str


def change_in_words(what: str, before: str, after: str, reason: str) -> str:
    """Format a decision for `fleetkeeper explain` and the log. Breaker entries have no `before`."""
    moved = f"{before} -> {after}" if before else after
    return f"{what} {moved} ({reason})"


@dataclass(frozen=True, slots=True)
class ReportedCondition:
    """A condition that the control loop decides, because it follows from measurements alone."""

    type: ConditionType
    status: Status
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class ControlReport:
    """The facts that the control loop reports about a service. The planner writes them to the status.

    An absent part is removed from the status, except `scaling`: then the planner explains the replicas.

    Every condition has one author. The control loop decides `conditions`, which follow from measurements
    alone: MetricsAvailable and MetricsCompatible. `reconcile.status` decides all others, from the spec,
    the children, the pods, and the facts in this report. For Degraded these are `safe_limits_cause` (why
    the control breaker keeps safe limits in force, "" if it does not), `shed_tiers` (tiers whose requests
    are shed), `remedy`, `hung_pods` (pods with work that make no progress), and `open_pods` (pods that demand no grant
    although the service does).
    """

    scaling: ScalingReport | None = None
    batching: BatchingReport | None = None
    breaker: BreakerReport | None = None
    memory: MemoryReport | None = None
    remedy: Remedy | None = None
    decisions: tuple[Change, ...] = ()
    safe_limits_cause: str = ""
    shed_tiers: tuple[str, ...] = ()
    hung_pods: tuple[str, ...] = ()
    open_pods: tuple[str, ...] = ()
    conditions: tuple[ReportedCondition, ...] = ()
