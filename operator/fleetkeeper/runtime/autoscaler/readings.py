"""The requests of the control loop to its source of samples, and the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.runtime.queue import Key


@dataclass(frozen=True, slots=True)
class Target:
    """A service whose pods are measured. Its objectives decide which bucket edges are read."""

    key: Key
    edges: Edges
    pods: tuple[PodView, ...]
    directly: bool = False
    """True to read the pods themselves, because replicas or admission may be reduced."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Samples by service."""

    samples: Mapping[Key, tuple[PodSample, ...]]
    lost: frozenset[Key] = frozenset()
    """Services for which Prometheus has no fresh samples."""
    disputed: frozenset[Key] = frozenset()
    """Services with pods for which Prometheus has several series where one is expected."""
    checks: bool = False
    """True if Prometheus' samples of the other services can be checked against the pods."""
    starts: Mapping[Key, tuple[PodSample, ...]] = field(default_factory=dict)
    """Direct samples of pods that are not ready, for the stage of their start."""
    backlogs: Mapping[Key, Backlog] = field(default_factory=dict)
    """The batch process's backlog by service."""

    def checks_directly(self, key: Key) -> bool:
        """Return whether a service's samples are from Prometheus and its pods can confirm them."""
        return self.checks and key not in self.lost and key not in self.disputed


class Source(Protocol):
    """The source of samples. It does not raise for an outage, but returns what is lost."""

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """Return the newest samples of the targets' pods."""
