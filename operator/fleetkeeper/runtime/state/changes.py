"""Changes between two states of an object that matter to decisions."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.reconcile.types import Child, Workload


def was_edited(before: Seen, after: Seen) -> bool:
    """Return whether fields that we set were changed, by us or by others."""
    old, new = before.record, after.record
    if not isinstance(old, Child) or not isinstance(new, Child):
        return False
    replicas = [r.desired_replicas for r in (old, new) if isinstance(r, Workload)]
    return len(set(replicas)) > 1 or (
        old.digest,
        old.controller_uid,
        old.service,
        old.deleting,
    ) != (
        new.digest,
        new.controller_uid,
        new.service,
        new.deleting,
    )


def differs(before: Seen, after: Seen) -> bool:
    """Return whether more than the resourceVersion changed."""
    old, new = before.record, after.record
    if isinstance(old, Child) and isinstance(new, Child):
        return replace(new, resource_version=old.resource_version) != old
    return old != new
