"""The three circuit breakers of a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker


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
