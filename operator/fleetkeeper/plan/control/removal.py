"""A pod that the control loop wants to delete, and what that pod itself must confirm first.

The loop decides on samples that may be old, lost or forged by the time it acts. So a pod is deleted
only if that very pod, read directly after the decision, still shows the reason. No answer is no
confirmation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleetkeeper.plan.control.constants import FRAGMENTED_RATIO
from fleetkeeper.plan.control.hangs import SAYS_HUNG
from fleetkeeper.plan.control.samples import PodSample
from fleetkeeper.plan.model import Notice


class Cause(StrEnum):
    """Why a pod is to be deleted."""

    HUNG = "hung"
    FRAGMENTED = "fragmented"


@dataclass(frozen=True, slots=True)
class Removal:
    """One pod to be deleted. `why` is for the log; `notice` is posted once the pod is deleted."""

    cause: Cause
    why: str
    notice: Notice

    def is_confirmed_by(self, sample: PodSample | None) -> bool:
        """Return whether a sample read from the pod after the decision shows the cause."""
        if sample is None:
            return False
        if self.cause is Cause.HUNG:
            return sample.gauges.hung == SAYS_HUNG
        return FRAGMENTED_RATIO < sample.gauges.memory_fragmentation_ratio <= 1.0
