"""A pod that the control loop wants to delete, and how that pod must confirm it first.

The samples of a decision may be old, lost or forged when it is applied. So a pod is deleted only if the
pod itself, read directly after the decision, still shows the cause. A pod that does not answer does not
confirm.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleetkeeper.autoscale.constants import FRAGMENTED_RATIO
from fleetkeeper.autoscale.signals.reported_runs import HUNG
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.common.values import Event


class Cause(StrEnum):
    """The cause for which a pod is deleted."""

    HUNG = "hung"
    FRAGMENTED = "fragmented"


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod to delete. `why` is for the log; the event `event` is recorded once the pod is deleted."""

    cause: Cause
    why: str
    event: Event

    def is_confirmed_by(self, sample: PodSample | None) -> bool:
        """Return whether a sample read from the pod after the decision shows the cause."""
        if sample is None:
            return False
        if self.cause is Cause.HUNG:
            return sample.gauges.hung == HUNG
        return FRAGMENTED_RATIO < sample.gauges.memory_fragmentation_ratio <= 1.0
