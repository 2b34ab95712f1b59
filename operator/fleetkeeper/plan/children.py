"""Which writes bring the children to what is wanted: nothing when they are as they shall be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.plan.digest import digest_of
from fleetkeeper.plan.model import (
    Apply,
    Child,
    Delete,
    Kind,
    Manifest,
    Snapshot,
    Workload,
    WriteFailure,
    WriteProblem,
)

TRY_AGAIN_AFTER_S = 30.0
"""A write that was refused is asked for again no sooner than this after the last attempt."""

Key = tuple[Kind, str]


class Why(StrEnum):
    """Why a child is written. The values stand in events and logs."""

    CREATE = "create"
    REPAIR = "repair"
    ADOPT = "adopt"
    SCALE = "scale"
    PRUNE = "prune"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A child's name that is taken by an object of somebody else.

    `is_leftover`: it carries this service's labels, so it belongs to a former service of the same
    name and the garbage collector is about to remove it.
    """

    kind: Kind
    name: str
    is_leftover: bool = False


@dataclass(frozen=True, slots=True)
class ChildrenDecision:
    """The writes in order, the names that are taken, and when a refused write is due again."""

    actions: tuple[Apply | Delete, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    again_after_s: float | None = None


def key_of(manifest: Manifest) -> Key:
    """Kind and name of a manifest."""
    return Kind(manifest["kind"]), manifest["metadata"]["name"]


def decide_children(
    desired: Sequence[Manifest],
    snapshot: Snapshot,
    *,
    service: str,
    owner_uid: str,
    now: float,
    live_bound: frozenset[Key] = frozenset(),
    untouched: frozenset[Key] = frozenset(),
) -> ChildrenDecision:
    """Creations, repairs, adoptions and removals, each in the order of `desired`.

    Deployments are created after what their pods need, Services last: Kubernetes allots cluster
    addresses one after another, and pods need not wait for that.

    `live_bound` names Deployments whose number of replicas rests on the live one, so that a write
    holds only for the object as it was seen. `untouched` names children that are wanted but not
    written in this look. While a name is taken, nothing is
    created: half a service would only hold accelerators. What is already there is still repaired.
    """
    actions: list[Apply | Delete] = []
    conflicts = _conflicts(desired, snapshot, service, owner_uid)
    for manifest in desired:
        key = key_of(manifest)
        if key in untouched:
            continue
        child = snapshot.children.get(key)
        if child is not None and _cannot_change(child, snapshot.failures, owner_uid):
            actions.append(_removal(child, Why.REPAIR))
            continue
        action = _write(manifest, child, owner_uid, key in live_bound)
        is_withheld = action is not None and action.create_only and _is_held_back(key, conflicts)
        if action is not None and not is_withheld:
            actions.append(action)
    actions.sort(key=_turn)
    actions += _prunings({key_of(item) for item in desired}, snapshot, service, owner_uid)
    due, again = _without_refused(actions, snapshot.failures, now)
    return ChildrenDecision(due, conflicts, again)


def _turn(action: Apply | Delete) -> int:
    """Creations first, those of Deployments after what their pods need, those of Services last."""
    if not (isinstance(action, Apply) and action.create_only):
        return 3
    return {Kind.DEPLOYMENT: 1, Kind.SERVICE: 2}.get(action.kind, 0)


def _cannot_change(child: Child, failures: tuple[WriteFailure, ...], owner_uid: str) -> bool:
    """Whether the child has to be made anew: the role that a RoleBinding names is immutable."""
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


def _removal(child: Child, why: Why) -> Delete:
    return Delete(child.kind, child.name, child.uid, child.resource_version, why)


def _conflicts(
    desired: Sequence[Manifest], snapshot: Snapshot, service: str, owner_uid: str
) -> tuple[Conflict, ...]:
    """Names taken by others: seen in the cache, or found when the child was to be created."""
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
    """Whether the child belongs to this service or, labelled and without a controller, to nobody."""
    if child.controller_uid is not None:
        return child.controller_uid == owner_uid
    return child.service == service


def _is_held_back(key: Key, conflicts: tuple[Conflict, ...]) -> bool:
    """Whether a creation waits for a conflict over another name.

    The child in conflict itself is asked for again, so that the end of the conflict is noticed.
    """
    return bool(conflicts) and key not in {(item.kind, item.name) for item in conflicts}


def _write(
    manifest: Manifest, child: Child | None, owner_uid: str, is_live_bound: bool
) -> Apply | None:
    """The write that one child needs, None when it is as wanted or not ours to write."""
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
    version = child.resource_version if is_scaled or is_live_bound else None
    return Apply(kind, name, manifest, digest, why, resource_version=version)


def _prunings(wanted: set[Key], snapshot: Snapshot, service: str, owner_uid: str) -> list[Delete]:
    """Removals of what a changed mode no longer needs: our labels and our owner UID, nothing else."""
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
    """The actions that are due, and in how many seconds the next refused one is."""
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
    """Seconds until the write is due: at once when it is not the one that was refused."""
    if failure is None:
        return 0.0
    digest = action.digest if isinstance(action, Apply) else ""
    if failure.digest and failure.digest != digest:
        return 0.0
    return failure.tried + TRY_AGAIN_AFTER_S - now
