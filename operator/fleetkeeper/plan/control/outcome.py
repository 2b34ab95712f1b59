"""What one tick decided for one service: the value that the runtime carries out and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fleetkeeper.plan.control.arbitrate import Want
from fleetkeeper.plan.control.control_breaker import ControlBreaker
from fleetkeeper.plan.control.load_breaker import LoadBreaker
from fleetkeeper.plan.control.remedies import Remedy
from fleetkeeper.plan.control.signals import Signals
from fleetkeeper.plan.control.source_breaker import SourceBreaker
from fleetkeeper.plan.control.supply import Supply
from fleetkeeper.plan.control.targets import Targets
from fleetkeeper.plan.control.values import (
    Admission,
    ControlSettings,
    Decision,
    Limits,
    PodOrder,
)
from fleetkeeper.plan.model import Notice, ReplicaOrder


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """What `decide_service` gives. `puts` are due now; `want` goes to `arbitrate`.

    `replacement`: pods whose engine hangs; `restart`: replicas whose allocator is fragmented, and
    `fragmentation_ratio` the worst that may be judged. `pod_load`: running and waiting by pod, from
    which the planner marks the emptiest.
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
    puts: tuple[PodOrder, ...]
    load: LoadBreaker
    control: ControlBreaker
    remedy: Decision[Remedy | None]
    replacement: Decision[tuple[str, ...]]
    restart: Decision[tuple[str, ...]]
    notices: tuple[Notice, ...] = ()
    capacity: float = 0.0
    pressure: float = 0.0
    cold_start_s: float = 0.0
    fragmentation_ratio: float = 0.0
    source: SourceBreaker = field(default_factory=SourceBreaker)
    live_replicas: int = 0
    pod_load: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def replace_pods(self) -> Mapping[str, str]:
        """Pods to be replaced now, and why."""
        acts = [self.replacement] if self.replacement.valid else []
        if self.restart.valid and self.settings.restarts:
            acts.append(self.restart)
        return {pod: decision.detail for decision in acts for pod in decision.value}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What `conclude` gives, in the words of the planner's snapshot.

    `order` is None where the loop does not order (hold, pinned, Advisory, paused).
    `notices` do not tell of replicas: the planner does, when it has written them.
    `status`: the pieces scaling, batching, breaker, memory, remedy, decisions, and `conditions`.
    `metrics`: (name without prefix, labels, value) of gauges to export.
    """

    order: ReplicaOrder | None
    status: dict[str, Any]
    notices: tuple[Notice, ...]
    metrics: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]
