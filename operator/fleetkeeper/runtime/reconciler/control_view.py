"""The control loop as the controller sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fleetkeeper.common.sleep import NOT_IDLE, Idle
from fleetkeeper.common.values import ControlReport, ReplicaAllocation, StartProgress
from fleetkeeper.runtime.queue import Key


@dataclass(frozen=True, slots=True)
class ControlView:
    """The control loop's result for a service; see `Snapshot`."""

    allocation: ReplicaAllocation | None = None
    control_report: ControlReport | None = None
    pod_load: Mapping[str, float] = field(default_factory=dict)
    is_pending: bool = False
    """True while the loop has not decided the service, and the status stays as it is."""
    starts: Mapping[str, StartProgress] = field(default_factory=dict)
    idle: Idle = NOT_IDLE


class Control(Protocol):
    """The part of the control loop that plans need."""

    def view(self, key: Key) -> ControlView:
        """Return its latest result for this service."""

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""

    def refused_replicas(self, key: Key) -> None:
        """Record that the API server refused an allocation of replicas."""


class NoControl:
    """A control loop that allocates and reports nothing."""

    def view(self, key: Key) -> ControlView:
        """Return an empty result."""
        del key
        return ControlView()

    def forget(self, key: Key) -> None:
        """Do nothing."""

    def refused_replicas(self, key: Key) -> None:
        """Do nothing."""
