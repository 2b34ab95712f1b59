"""The writes that bring the child objects to their desired state; none if they already match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleetkeeper.api.names import LABEL_SERVICE, address_name
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.plan import Apply, Delete
from fleetkeeper.reconcile.types import Child, Kind, Snapshot, Workload, WriteFailure, WriteProblem

TRY_AGAIN_AFTER_S = 30.0
"""Seconds between the last attempt of a refused write and the next one."""

Key = tuple[Kind, str]


class Why(StrEnum):
    """The reason for writing a child. The values appear in events and logs."""

    CREATE = "create"
    REPAIR = "repair"
    ADOPT = "adopt"
    SCALE = "scale"
    PRUNE = "prune"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A child's name that is taken by an object which does not belong to this service."""

    kind: Kind
    name: str
    is_leftover: bool = False
    """True if the object carries this service's labels. Then it belongs to a deleted service of the
    same name, and the garbage collector is about to remove it."""


@dataclass(frozen=True, slots=True)
class ChildrenDecision:
    """The writes in order, the name conflicts, and the seconds until a refused write is due."""

    actions: tuple[Apply | Delete, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    again_after_s: float | None = None


def key_of(manifest: Manifest) -> Key:
    """Return the kind and name of a manifest."""
    return Kind(manifest["kind"]), manifest["metadata"]["name"]


def decide_children(
    desired: Sequence[Manifest],
    snapshot: Snapshot,
    *,
    service: str,
    owner_uid: str,
    now: float,
    untouched: frozenset[Key] = frozenset(),
) -> ChildrenDecision:
    """Return the creations, repairs, adoptions and removals, each in the order of `desired`.

    Deployments are created after the objects that their pods need. Services are created last:
    Kubernetes allocates cluster addresses one at a time, and pods need not wait for that.

    Every write of an existing child is valid only for the resourceVersion that was read. `untouched`
    names children that are wanted but not written in this reconcile. While a name is taken, nothing
    is created, because an incomplete service would only occupy accelerators. Existing children are
    still repaired.
    """
    actions: list[Apply | Delete] = []
    conflicts = _conflicts(desired, snapshot, service, owner_uid)
    for manifest in desired:
        key = key_of(manifest)
        if key in untouched:
            continue
        child = snapshot.children.get(key)
        if child is not None and (
            _cannot_change(child, snapshot.failures, owner_uid)
            or _is_outdated_job(child, manifest, service, owner_uid)
        ):
            actions.append(_removal(child, Why.REPAIR))
            continue
        action = _write(manifest, child, owner_uid)
        is_withheld = action is not None and action.create_only and _is_held_back(key, conflicts)
        if action is not None and not is_withheld:
            actions.append(action)
    actions.sort(key=_sort_key)
    actions += _prunings({key_of(item) for item in desired}, snapshot, service, owner_uid)
    due, again = _without_refused(actions, snapshot.failures, now)
    return ChildrenDecision(due, conflicts, again)


def _sort_key(action: Apply | Delete) -> int:
    """Return the sort key of an action: creations first, those with pods late, Services last."""
    if not (isinstance(action, Apply) and action.create_only):
        return 3
    return {Kind.JOB: 1, Kind.DEPLOYMENT: 1, Kind.SERVICE: 2}.get(action.kind, 0)


def _cannot_change(child: Child, failures: tuple[WriteFailure, ...], owner_uid: str) -> bool:
    """Return True if the child must be recreated, because a RoleBinding's roleRef is immutable."""
    return (
        child.kind is Kind.ROLE_BINDING
        and child.controller_uid == owner_uid
        and not child.deleting
        and any(
            item.problem is WriteProblem.INVALID
            and (item.kind, item.name) == (child.kind, child.name)
            for item in failures
        )
    )


def _is_outdated_job(child: Child, manifest: Manifest, service: str, owner_uid: str) -> bool:
    """Return True if the child is our Job and would change, which Kubernetes does not allow."""
    return (
        child.kind is Kind.JOB
        and not child.deleting
        and _is_ours(child, service, owner_uid)
        and child.digest != digest_of(manifest)
    )


def _removal(child: Child, why: Why) -> Delete:
    return Delete(child.kind, child.name, child.uid, child.resource_version, why)


def _conflicts(
    desired: Sequence[Manifest], snapshot: Snapshot, service: str, owner_uid: str
) -> tuple[Conflict, ...]:
    """Return the names that are taken, as seen in the cache or found by a refused creation."""
    found = []
    refused = {
        (item.kind, item.name)
        for item in snapshot.failures
        if item.problem is WriteProblem.CONFLICT
    }
    for manifest in desired:
        kind, name = key_of(manifest)
        child = snapshot.children.get((kind, name))
        if child is None:
            if (kind, name) in refused:
                found.append(Conflict(kind, name))
        elif not child.deleting and not _is_ours(child, service, owner_uid):
            found.append(Conflict(kind, name, is_leftover=child.service == service))
    return tuple(found)


def _is_ours(child: Child, service: str, owner_uid: str) -> bool:
    """Return True if this service is the child's controller, or has labeled it and none is."""
    if child.controller_uid is not None:
        return child.controller_uid == owner_uid
    return child.service == service


def owns_address(snapshot: Snapshot) -> bool | None:
    """Return whether the Kubernetes Service that clients call is ours; None if there is none.

    Only its controller counts: a label is a text that others can write. Without a controller it is
    adopted or recreated at once, and nothing is known until then.
    """
    metadata = snapshot.resource.get("metadata") or {}
    key = (Kind.SERVICE, address_name(str(metadata.get("name") or "")))
    child = snapshot.children.get(key)
    if child is not None and child.controller_uid is not None:
        return child.controller_uid == metadata.get("uid")
    is_taken = any(
        (item.kind, item.name) == key and item.problem is WriteProblem.CONFLICT
        for item in snapshot.failures
    )
    return False if is_taken else None


def _is_held_back(key: Key, conflicts: tuple[Conflict, ...]) -> bool:
    """Return True if a creation waits for the end of a conflict over another name.

    The creation of the child in conflict is repeated, which detects the end of the conflict.
    """
    return bool(conflicts) and key not in {(item.kind, item.name) for item in conflicts}


def _write(manifest: Manifest, child: Child | None, owner_uid: str) -> Apply | None:
    """Return the write that one child needs, None if it matches or belongs to someone else.

    Each write states the child's owner. Without the resourceVersion as a precondition, it could give
    the child back to a service whose deletion has just removed it from there.
    """
    kind, name = key_of(manifest)
    digest = digest_of(manifest)
    if child is None:
        return Apply(kind, name, manifest, digest, Why.CREATE, force=False, create_only=True)
    service = manifest["metadata"]["labels"][LABEL_SERVICE]
    if child.deleting or not _is_ours(child, service, owner_uid):
        return None
    is_scaled = isinstance(child, Workload) and (
        child.desired_replicas != manifest["spec"].get("replicas")
    )
    if child.controller_uid is None:
        why = Why.ADOPT
    elif child.digest != digest:
        why = Why.REPAIR
    elif is_scaled:
        why = Why.SCALE
    else:
        return None
    return Apply(kind, name, manifest, digest, why, resource_version=child.resource_version)


def _prunings(wanted: set[Key], snapshot: Snapshot, service: str, owner_uid: str) -> list[Delete]:
    """Return the removals of children that are no longer wanted.

    Only objects with this service's label and owner UID are removed.
    """
    return [
        _removal(child, Why.PRUNE)
        for key, child in sorted(snapshot.children.items())
        if key not in wanted
        and child.controller_uid == owner_uid
        and child.service == service
        and not child.deleting
    ]


def _without_refused(
    actions: list[Apply | Delete], failures: tuple[WriteFailure, ...], now: float
) -> tuple[tuple[Apply | Delete, ...], float | None]:
    """Return the actions that are due, and the seconds until the next refused one is due."""
    refused = {
        (item.kind, item.name): item
        for item in failures
        if item.problem is not WriteProblem.UNAVAILABLE
    }
    due, waits = [], []
    for action in actions:
        left = _wait(action, refused.get((action.kind, action.name)), now)
        if left > 0:
            waits.append(left)
        else:
            due.append(action)
    return tuple(due), min(waits, default=None)


def _wait(action: Apply | Delete, failure: WriteFailure | None, now: float) -> float:
    """Return the remaining back-off of this write in seconds; 0 if another write was refused."""
    if failure is None:
        return 0.0
    digest = action.digest if isinstance(action, Apply) else ""
    if failure.digest and failure.digest != digest:
        return 0.0
    return failure.tried + TRY_AGAIN_AFTER_S - now
