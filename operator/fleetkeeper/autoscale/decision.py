"""The result of one tick for one service, which the runtime applies and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fleetkeeper.autoscale.arbitrate import Want
from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.capacity.targets import Targets
from fleetkeeper.autoscale.events import WARNING, restart_events
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import (
    Admission,
    ControlSettings,
    Decision,
    Limits,
    LimitsRequest,
)
from fleetkeeper.common.values import ControlReport, Event, Remedy, ReplicaAllocation


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The result of `decide_service`. `puts` are due now; `want` goes to `arbitrate`.

    `replacement`: pods whose engine is hung. `restart`: replicas whose allocator is fragmented.
    `fragmentation_ratio`: the highest ratio of a replica that may be judged. `pod_load`: running
    sequences by pod; the planner removes the least loaded pods first. `asks_pods`: read the pods
    directly, because replicas or admitted requests may be reduced. `checks_directly`,
    `prometheus_disputed`: as in the inputs.
    """

    namespace: str
    name: str
    settings: ControlSettings
    signals: Signals
    supply: Supply
    targets: Targets | None
    replicas: Decision[int]
    limits: Decision[Limits]
    in_force: Limits
    admission: Admission
    want: Want
    puts: tuple[LimitsRequest, ...]
    load: LoadBreaker
    control: ControlBreaker
    remedy: Decision[Remedy | None]
    replacement: Decision[tuple[str, ...]]
    restart: Decision[tuple[str, ...]]
    events: tuple[Event, ...] = ()
    capacity: float = 0.0
    pressure: float = 0.0
    cold_start_s: float = 0.0
    fragmentation_ratio: float = 0.0
    source: SourceBreaker = field(default_factory=SourceBreaker)
    live_replicas: int = 0
    pod_load: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    checks_directly: bool = False
    prometheus_disputed: bool = False
    asks_pods: bool = False

    @property
    def replace_pods(self) -> Mapping[str, Removal]:
        """Pods to replace now; each only if it confirms the cause when it is read directly."""
        found = {}
        if self.replacement.valid:
            why = self.replacement.detail
            event = Event(WARNING, self.replacement.reason, why)
            found = {pod: Removal(Cause.HUNG, why, event) for pod in self.replacement.value}
        if self.restart.valid and self.settings.restarts:
            events = restart_events(self.restart, acts=True)
            for pod, event in zip(self.restart.value, events, strict=True):
                found[pod] = Removal(Cause.FRAGMENTED, self.restart.detail, event)
        return found


@dataclass(frozen=True, slots=True)
class TickResult:
    """The result of a tick after arbitration, which `build_report` returns.

    `allocation`: None if the loop does not set replicas (unchanged, pinned, Advisory, paused).
    `report`: for the planner. `events`: events, except for changes of replicas: the planner records
    those once they are written. `metrics`: (name without prefix, labels, value) of the gauges to export.
    """

    allocation: ReplicaAllocation | None
    report: ControlReport
    events: tuple[Event, ...]
    metrics: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]
