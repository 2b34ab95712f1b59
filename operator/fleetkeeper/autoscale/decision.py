"""The result of one tick for one service, which the runtime applies and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetkeeper.autoscale.arbitrate import Want
from fleetkeeper.autoscale.events import WARNING, restart_events
from fleetkeeper.autoscale.rules.deadline import DeadlineNeed
from fleetkeeper.autoscale.rules.load_breaker import pressure
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import Breakers, TickState
from fleetkeeper.autoscale.types import (
    Admission,
    ControlSettings,
    Decision,
    Limits,
    LimitsRequest,
)
from fleetkeeper.common.sleep import NOT_IDLE, Idle
from fleetkeeper.common.values import ControlReport, Event, Remedy, ReplicaAllocation


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The result of `decide_service`."""

    state: TickState
    limits: Decision[Limits]
    """The limits that the rules decide."""
    in_force: Limits
    """The limits of all pods except a canary."""
    admission: Admission
    puts: tuple[LimitsRequest, ...]
    """Limits requests that are due now."""
    replicas: Decision[int]
    want: Want
    """The recommendation, for `arbitrate`."""
    remedy: Decision[Remedy | None]
    replacement: str
    """The pod whose engine is hung; empty if none is replaced now."""
    restart: Decision[tuple[str, ...]]
    """Replicas whose allocator is fragmented."""
    fragmentation_ratio: float
    """The highest ratio of the replicas that may be judged."""
    events: tuple[Event, ...]
    asks_pods: bool
    """True if the pods must be read directly, because replicas or admitted requests may be reduced."""
    deadline: DeadlineNeed | None = None
    """The replicas that a backlog requires."""
    idle: Idle = NOT_IDLE
    """Whether the service may go to sleep."""

    @property
    def settings(self) -> ControlSettings:
        """The settings of the service."""
        return self.state.inputs.settings

    @property
    def signals(self) -> Signals:
        """The signals of this tick."""
        return self.state.signals

    @property
    def breakers(self) -> Breakers:
        """The breakers after this tick."""
        return self.state.breakers

    @property
    def live_replicas(self) -> int:
        """The live Deployment's number of replicas."""
        return self.state.inputs.replicas

    @property
    def pressure(self) -> float:
        """The pressure of the load breaker; 0 while signals are unknown."""
        if not self.signals.known:
            return 0.0
        return pressure(self.signals, self.settings, self.state.estimate.capacity)

    @property
    def pod_load(self) -> Mapping[str, float]:
        """Running sequences by pod; the planner removes the least loaded pods first."""
        return dict(self.signals.running_by_pod)

    @property
    def replace_pods(self) -> Mapping[str, Removal]:
        """Pods to replace now; each only if it confirms the cause when it is read directly."""
        found, hung = {}, self.replacement
        if hung:
            why = f"Pod {hung} has work but makes no progress and reports that it is hung: it is replaced"
            found[hung] = Removal(Cause.HUNG, why, Event(WARNING, "EngineHung", why))
        if self.restart.valid and self.settings.restarts:
            events = restart_events(self.restart, acts=True)
            for pod, event in zip(self.restart.value, events, strict=True):
                found[pod] = Removal(Cause.FRAGMENTED, self.restart.detail, event)
        return found


@dataclass(frozen=True, slots=True)
class TickResult:
    """The result of a tick after arbitration, which `build_report` returns."""

    allocation: ReplicaAllocation | None
    """None if the loop does not set replicas (unchanged, pinned, Advisory, paused)."""
    report: ControlReport
    """The facts for the planner."""
    events: tuple[Event, ...]
    """Events, except for changes of replicas: the planner records those once they are written."""
    metrics: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]
    """(name without prefix, labels, value) of the gauges to export."""
