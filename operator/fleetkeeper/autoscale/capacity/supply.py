"""Ready and pending pods, and the measured cold start."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import (
    COLD_START_MAX_S,
    COLD_START_S,
    COLD_START_WEIGHT,
    PENDING_COLD_STARTS,
    RATE_S,
)
from fleetkeeper.autoscale.types import PodView


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The measured time from a pod's creation to ready, in seconds."""

    seconds: float = COLD_START_S
    measured_to: float = 0.0
    """The latest time at which a measured pod became ready."""


@dataclass(frozen=True, slots=True)
class Supply:
    """Pods by state."""

    ready: int = 0
    pending: int = 0
    overdue: int = 0
    """Pods that have been pending for more than two cold starts. They do not serve soon."""
    hung: int = 0
    """Ready or pending pods whose engine is hung."""
    new: int = 0
    """Pods that became ready less than 30 s ago: queue wait, a mean of 30 s, does not show their effect yet."""

    @property
    def serving(self) -> int:
        """The pods that serve, or will soon."""
        return self.ready + self.pending - self.hung


def measured_cold_start(cold_start: ColdStart, pods: Sequence[PodView]) -> ColdStart:
    """Return the cold start, updated with the pods that became ready since the last tick.

    The first measurement replaces the assumption; later ones weigh 30%.
    """
    new = sorted(
        (pod.ready_since, pod.ready_since - pod.created)
        for pod in pods
        if pod.ready_since is not None and pod.ready_since > cold_start.measured_to
    )
    for ready_since, measured_s in new:
        took_s = min(max(measured_s, 1.0), COLD_START_MAX_S)
        first = cold_start.measured_to == 0.0
        weight = 1.0 if first else COLD_START_WEIGHT
        cold_start = ColdStart(
            cold_start.seconds + weight * (took_s - cold_start.seconds), ready_since
        )
    return cold_start


def supply_of(
    pods: Sequence[PodView], hung_pods: Container[str], cold_start_s: float, now: float
) -> Supply:
    """Count the ready, pending, overdue, hung and new pods that are not being deleted."""
    ready = pending = overdue = hung = new = 0
    late_s = PENDING_COLD_STARTS * cold_start_s
    for pod in pods:
        if pod.deleting:
            continue
        never_ready = not pod.ready and pod.ready_since is None
        age_s = now - pod.created
        if never_ready and age_s > late_s:
            overdue += 1
            continue
        ready += pod.ready
        pending += not pod.ready
        hung += pod.name in hung_pods
        if pod.ready_since is not None and now - pod.ready_since < RATE_S:
            # An older pod did not start: it is ready again.
            new += pod.ready and age_s < late_s + RATE_S
    return Supply(ready, pending, overdue, hung, new)
