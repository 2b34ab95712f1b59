"""The children, ReplicaSets and pods of one service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.api.names import FIELD_MANAGER, engine_name
from fleetkeeper.reconcile.types import Child, Pod, Revision, Workload
from fleetkeeper.runtime.state.gpu_shares import GpuShare

FOREIGN_WRITES_S: Final = 600.0
"""Time for which changes of replicas by others are remembered."""


@dataclass(slots=True)
class Members:
    """The newest state of each object of a service, by (kind, name)."""

    by_name: dict[tuple[str, str], Seen] = field(default_factory=dict)
    gpus: GpuShare | None = None
    """Counted on first use, reset when a member changes."""
    _foreign_replica_writes: list[tuple[float, str]] = field(default_factory=list)

    def records(self) -> Iterator[Child | Revision | Pod]:
        """Yield what decisions know of each object."""
        for found in self.by_name.values():
            yield found.record

    def note_replicas(self, before: Seen, after: Seen, now: float) -> None:
        """Remember a change of the engine Deployment's replicas that is not ours."""
        old, new = before.record, after.record
        if (
            isinstance(old, Workload)
            and isinstance(new, Workload)
            and new.name == engine_name(after.service or "")
            and new.desired_replicas != old.desired_replicas
            and new.replicas_manager not in {FIELD_MANAGER, ""}
        ):
            self._foreign_replica_writes.append((now, new.replicas_manager))

    def foreign_replica_writes(self, now: float) -> tuple[tuple[float, str], ...]:
        """Return the remembered changes by others in the last 10 minutes."""
        oldest = now - FOREIGN_WRITES_S
        self._foreign_replica_writes = [
            write for write in self._foreign_replica_writes if write[0] >= oldest
        ]
        return tuple(self._foreign_replica_writes)
