"""What the control loop asks its source of samples, and what it gets."""

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
    """A service whose pods are measured; its objectives decide which bucket edges are read.

    `directly`: read the pods themselves, because replicas or admission may be reduced.
    """

    key: Key
    edges: Edges
    pods: tuple[PodView, ...]
    directly: bool = False


@dataclass(frozen=True, slots=True)
class Readings:
    """Samples by service, and the services for which Prometheus has nothing fresh (`lost`).

    `disputed`: services with pods for which Prometheus has several series where one is expected.
    `starts`: direct samples of pods that are not ready, for the stage of their start.
    `checks`: Prometheus' samples of the other services can be checked against the pods. `backlogs`: what
    the batch process has for services.
    """

    samples: Mapping[Key, tuple[PodSample, ...]]
    lost: frozenset[Key] = frozenset()
    disputed: frozenset[Key] = frozenset()
    checks: bool = False
    starts: Mapping[Key, tuple[PodSample, ...]] = field(default_factory=dict)
    backlogs: Mapping[Key, Backlog] = field(default_factory=dict)

    def checks_directly(self, key: Key) -> bool:
        """Return whether a service's samples are from Prometheus and its pods can confirm them."""
        return self.checks and key not in self.lost and key not in self.disputed


class Source(Protocol):
    """The source of samples. It does not raise for an outage, but returns what is lost."""

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """Return the newest samples of the targets' pods."""
