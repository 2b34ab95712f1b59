"""The result of one reconcile: what the runtime is to write, report and read next."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.common.values import Event, Manifest
from fleetkeeper.reconcile.types import Kind


@dataclass(frozen=True, slots=True)
class Apply:
    """A server-side apply of a child. Without `force`, another owner of a field is a conflict.

    With `create_only`, the child is expected to be absent, and the API server refuses the write if
    an object has that name. Then that object is read. An object of this service (our owner UID, or
    our labels and no controller) is added to `Snapshot.children` and the service is planned again;
    any other object becomes a `WriteFailure` CONFLICT.
    `resource_version` is a precondition (409 if the live object has changed since).
    """

    kind: Kind
    name: str
    manifest: Manifest
    digest: str
    why: str
    force: bool = True
    create_only: bool = False
    resource_version: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A deletion of a child or a pod, with its UID and resourceVersion as preconditions."""

    kind: str
    name: str
    uid: str
    resource_version: str
    why: str


@dataclass(frozen=True, slots=True)
class MarkPod:
    """A write of a pod's deletion cost. A scale-down removes the pods with the lowest cost."""

    name: str
    uid: str
    deletion_cost: int


Action = Apply | Delete | MarkPod


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes for one service. The same snapshot gives the same plan, which may be empty.

    `status` is the complete new status, None if the present one is up to date. Actions run in order
    (children first), then the status is written, then the events.
    `wants_templates` lists ReplicaSets whose pod template must be in the next snapshot,
    `wants_events` the UIDs of pods whose Warning events must be. The runtime reads them and plans
    again at once, one time for each name. It may keep templates, which are immutable, and drops
    events after a minute.
    """

    actions: tuple[Action, ...] = ()
    status: Manifest | None = None
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    wants_templates: tuple[str, ...] = ()
    wants_events: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return True if nothing would be written."""
        return not self.actions and self.status is None and not self.events
