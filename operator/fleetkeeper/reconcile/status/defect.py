"""The status for an internal error of Fleetkeeper, including one that prevents a plan."""

from __future__ import annotations

from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.api.names import UNWRITTEN_STATUS
from fleetkeeper.common.values import Event, Manifest
from fleetkeeper.reconcile.plan import Plan
from fleetkeeper.reconcile.types import Defect
from fleetkeeper_contract import rfc3339


def defect_message(defect: Defect) -> str:
    """Return the message for a defect: what failed, what is not affected, and what to do."""
    return (
        f"Internal error in Fleetkeeper: step {defect.where!r} failed with {defect.error}. Running "
        "pods are not affected. Report it with the operator's log line 'defect' for this service."
    )


def plan_of_defect(resource: Manifest, defect: Defect, now: float) -> Plan:
    """Return the plan for a service whose planning itself fails.

    Only the condition Degraded changes and shows the defect. Nothing else is written.
    """
    metadata, present = resource.get("metadata") or {}, resource.get("status") or {}
    before = previous_condition(present, ConditionType.DEGRADED)
    condition = _degraded(defect, int(metadata.get("generation") or 0), before, now)
    if before == condition or metadata.get("deletionTimestamp"):
        return Plan()
    others = [item for item in present.get("conditions") or () if item is not before]
    event = Event("Warning", condition["reason"], condition["message"])
    is_recorded = before is not None and before.get("reason") == condition["reason"]
    return Plan(
        # A new service stays unobserved: without a generation, Flux takes it as ready.
        status={**(present or UNWRITTEN_STATUS), "conditions": [*others, condition]},
        events=() if is_recorded else (event,),
    )


def _degraded(defect: Defect, generation: int, before: Any, now: float) -> dict[str, Any]:  # noqa: ANN401 - a part of a status
    was_true = before is not None and before.get("status") == Status.TRUE
    since = before.get("lastTransitionTime") if was_true else None
    return {
        "type": str(ConditionType.DEGRADED),
        "status": str(Status.TRUE),
        "observedGeneration": generation,
        "lastTransitionTime": since or rfc3339.format(now),
        "reason": str(Reason.INTERNAL_ERROR),
        "message": defect_message(defect),
    }
