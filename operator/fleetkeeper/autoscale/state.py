"""The state of one tick of one service before limits and replicas are decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetkeeper.autoscale.capacity.estimate import Estimate
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings


@dataclass(frozen=True, slots=True)
class Breakers:
    """The breakers: `load` sheds requests, `control` keeps safe limits, `source` reports."""

    load: LoadBreaker = field(default_factory=LoadBreaker)
    control: ControlBreaker = field(default_factory=ControlBreaker)
    source: SourceBreaker = field(default_factory=SourceBreaker)

    @property
    def are_closed(self) -> bool:
        """Return whether all breakers are closed."""
        return self.load.is_closed and self.control.is_closed and not self.source.is_open


@dataclass(frozen=True, slots=True)
class TickState:
    """The inputs of the rules for limits and replicas."""

    inputs: ControlInputs
    signals: Signals
    planned: Signals
    """The signals by which replicas are sized: without tier batch while a backlog is known."""
    estimate: Estimate
    breakers: Breakers
    backlog: Backlog | None = None
    """None without a known backlog."""

    @property
    def settings(self) -> ControlSettings:
        """The settings of the service."""
        return self.inputs.settings

    @property
    def breakers_closed(self) -> bool:
        """Return whether no breaker acts; breakers that only report count as closed."""
        is_closed = self.breakers.load.is_closed and self.breakers.control.is_closed
        return is_closed or not self.settings.breakers_act

    @property
    def keeps_safe_limits(self) -> bool:
        """Return whether the control breaker keeps safe values in force."""
        return self.settings.breakers_act and not self.breakers.control.is_closed
