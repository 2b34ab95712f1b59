"""Accelerators in a service's records, counted once and again when a record changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetkeeper.api.names import engine_name
from fleetkeeper.common.budget import Holding
from fleetkeeper.reconcile.observe.facts import holds_accelerators
from fleetkeeper.reconcile.types import Child, Pod, Revision, Workload


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Accelerators of one service's engines: by the Deployment's replicas, and by pods on nodes."""

    owner: str | None = None
    desired: int = 0
    living: int = 0
    ending: int = 0

    def holding(self, service_uid: str | None) -> Holding:
        """Return the holding. A Deployment that the service does not own counts by its pods only."""
        is_own = service_uid is not None and self.owner in {None, service_uid}
        desired = self.desired if is_own else 0
        return Holding(desired, self.ending + max(0, self.living - desired))


def share_of(record: Child | Revision | Pod | None) -> tuple[object, ...]:
    """Return the fields of a record that `count_gpus` reads."""
    if isinstance(record, Pod):
        return record.accelerators if holds_accelerators(record) else 0, record.deleting
    if isinstance(record, Workload):
        return record.desired_replicas * record.accelerators, record.controller_uid
    return ()


def count_gpus(service: str, records: Iterable[Child | Revision | Pod]) -> GpuShare:
    """Return the share of the service of this name."""
    owner, desired, living, ending = None, 0, 0, 0
    for record in records:
        if isinstance(record, Workload) and record.name == engine_name(service):
            owner, desired = record.controller_uid, record.desired_replicas * record.accelerators
        elif isinstance(record, Pod) and holds_accelerators(record):
            living += 0 if record.deleting else record.accelerators
            ending += record.accelerators if record.deleting else 0
    return GpuShare(owner, desired, living, ending)
