"""The inputs of one reconcile, read once from the snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.observe.diagnosis import Diagnosis, decide_diagnosis
from fleetkeeper.reconcile.observe.facts import Facts, facts_of
from fleetkeeper.reconcile.types import Snapshot


@dataclass(frozen=True, slots=True)
class ReconcileInputs:
    """The snapshot of one service with what follows from it, the settings, and the time."""

    snapshot: Snapshot
    context: PlanContext
    facts: Facts
    diagnosis: Diagnosis
    status: Mapping[str, Any]
    generation: int
    now: float

    @property
    def is_new_generation(self) -> bool:
        """Return True if the spec has changed since the status was written."""
        return bool(self.status.get("observedGeneration") != self.generation)


def inputs_of(snapshot: Snapshot, context: PlanContext, now: float) -> ReconcileInputs:
    """Return the inputs of a reconcile at the time `now`."""
    metadata = snapshot.resource.get("metadata") or {}
    facts = facts_of(snapshot, str(metadata.get("name") or ""))
    return ReconcileInputs(
        snapshot,
        context,
        facts,
        decide_diagnosis(snapshot, facts, now),
        snapshot.resource.get("status") or {},
        int(metadata.get("generation") or 0),
        now,
    )
