"""The conditions of a service: each is a small pure function of one reconcile's findings.

A message contains nothing that changes by itself (no counts, no times), so a condition is written
only when its meaning changes. `lastTransitionTime` changes only when the status flips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fleetkeeper.api.conditions import (
    ONLY_WHEN_TRUE,
    ConditionType,
    Status,
    fit_message,
    previous_condition,
)
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.availability import available, ready
from fleetkeeper.reconcile.status.degradation import degraded
from fleetkeeper.reconcile.status.measurements import (
    memory_within_cap,
    metrics_available,
    metrics_compatible,
    scaling_limited,
)
from fleetkeeper.reconcile.status.progress import progressing, reconciling, stalled
from fleetkeeper.reconcile.status.value import Value
from fleetkeeper_contract import rfc3339

_DECISIONS: Mapping[ConditionType, Callable[[Assessment], Value | None]] = {
    ConditionType.AVAILABLE: available,
    ConditionType.READY: ready,
    ConditionType.PROGRESSING: progressing,
    ConditionType.RECONCILING: reconciling,
    ConditionType.STALLED: stalled,
    ConditionType.DEGRADED: degraded,
    ConditionType.METRICS_AVAILABLE: metrics_available,
    ConditionType.METRICS_COMPATIBLE: metrics_compatible,
    ConditionType.MEMORY_WITHIN_CAP: memory_within_cap,
    ConditionType.SCALING_LIMITED: scaling_limited,
}


def decide_conditions(assessment: Assessment, now: float) -> list[dict[str, Any]]:
    """Return all conditions in the order of `ConditionType`.

    A condition in `ONLY_WHEN_TRUE` is left out unless it is True.
    """
    reported = []
    for kind, decide in _DECISIONS.items():
        value = decide(assessment)
        if value is not None and (value.status is Status.TRUE or kind not in ONLY_WHEN_TRUE):
            reported.append(_to_status(kind, value, assessment, now))
    return reported


def _to_status(
    kind: ConditionType, value: Value, assessment: Assessment, now: float
) -> dict[str, Any]:
    """Return the condition as it is written to the status."""
    before = previous_condition(assessment.previous, kind)
    has_flipped = before is None or before.get("status") != value.status
    since = None if before is None or has_flipped else before.get("lastTransitionTime")
    return {
        "type": str(kind),
        "status": str(value.status),
        "observedGeneration": assessment.generation,
        "lastTransitionTime": since or rfc3339.format(now),
        "reason": str(value.reason),
        "message": fit_message(value.message),
    }
