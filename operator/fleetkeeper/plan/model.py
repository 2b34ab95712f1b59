"""What a decision sees and what it answers: the seam between plan (pure) and runtime (I/O).

`plan(snapshot, now) -> Plan`. Both are values. The caches of the runtime hold these records, not
Kubernetes objects: a Kubernetes object costs about five times its JSON as Python dicts.
Times are seconds since the epoch (float); absent means unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Manifest = dict[str, Any]
"""A complete Kubernetes object as a plain dict, deterministic, ready for server-side apply."""


class Kind(StrEnum):
    """The kinds of children, by their Kubernetes names."""

    DEPLOYMENT = "Deployment"
    SERVICE = "Service"
    SERVICE_ACCOUNT = "ServiceAccount"
    ROLE_BINDING = "RoleBinding"
    POD_DISRUPTION_BUDGET = "PodDisruptionBudget"
    CONFIG_MAP = "ConfigMap"
    NETWORK_POLICY = "NetworkPolicy"


@dataclass(frozen=True, slots=True)
class ObjectCondition:
    """A condition as another controller wrote it (a Deployment's, a pod's)."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """An object in the service's namespace that is or could be a child of it.

    `digest` is that of the fields which our field manager owns in the live object (by its
    managedFields), `.spec.replicas` left out, values in the API server's canonical form;
    `digest_of(manifest)` of a desired manifest is equal exactly when an apply would change nothing.
    """

    kind: Kind
    name: str
    uid: str
    resource_version: str
    digest: str
    controller_uid: str | None = None
    service: str | None = None
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Workload(Child):
    """A Deployment: what decisions need beyond its identity."""

    generation: int = 0
    observed_generation: int = 0
    template_hash: str = ""
    desired_replicas: int = 1
    replicas_manager: str = ""
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    conditions: tuple[ObjectCondition, ...] = ()


@dataclass(frozen=True, slots=True)
class Revision:
    """A ReplicaSet of the engine Deployment."""

    name: str
    uid: str
    deployment_uid: str
    number: int
    template_hash: str
    created: float
    desired_replicas: int = 0
    replicas: int = 0
    ready_replicas: int = 0


@dataclass(frozen=True, slots=True)
class Termination:
    """How a container ended: Kubernetes' reason and the engine's own termination line."""

    exit_code: int
    reason: str = ""
    message: str = ""
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """The state of one container of a pod."""

    name: str
    init: bool = False
    ready: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    terminated: Termination | None = None
    last_terminated: Termination | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a service: a dozen fields."""

    name: str
    uid: str
    service: str
    component: str
    revision_uid: str | None
    template_hash: str
    created: float
    phase: str = "Pending"
    ip: str = ""
    node: str = ""
    ready: bool = False
    ready_since: float | None = None
    scheduled: bool = False
    unschedulable: str = ""
    deleting: bool = False
    deletion_cost: int = 0
    containers: tuple[Container, ...] = ()


class WriteProblem(StrEnum):
    """Why the API server did not take a write (closed; the adapter maps its answers to these)."""

    CONFLICT = "Conflict"
    QUOTA = "QuotaExceeded"
    ADMISSION = "AdmissionDenied"
    INVALID = "Invalid"
    FORBIDDEN = "Forbidden"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    UNAVAILABLE = "Unavailable"


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """The last write of a child that failed and has not succeeded since."""

    kind: str
    name: str
    problem: WriteProblem
    message: str
    since: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one decision about one service may know.

    `resource` is the InferenceService as the API server holds it (its metadata, spec and status;
    managedFields dropped). `children` holds, by (kind, name), what carries our labels or bears a
    name that a child would take; `unread` names children not in the cache, which must be read by
    name before they are created. `templates` holds pod templates asked for by `Plan.wants_templates`.
    """

    resource: Manifest
    children: Mapping[tuple[Kind, str], Child] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    pods: tuple[Pod, ...] = ()
    failures: tuple[WriteFailure, ...] = ()
    templates: Mapping[str, Manifest] = field(default_factory=dict)
    foreign_replica_writes: tuple[tuple[float, str], ...] = ()
    settled_since: float | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child. Without `force` a foreign owner of a field is a conflict.

    `create_only`: the child is believed absent: it is first read by name, adopted only when it
    carries our labels and no foreign controller, and never overwritten.
    `resource_version` is a precondition (409 when the live object moved on).
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
    """Deletes a child or a pod, only this one (uid) and only as it was seen (resourceVersion)."""

    kind: str
    name: str
    uid: str
    resource_version: str
    why: str


@dataclass(frozen=True, slots=True)
class MarkPod:
    """Sets a pod's deletion cost, so that the emptiest goes first."""

    name: str
    uid: str
    deletion_cost: int


Action = Apply | Delete | MarkPod


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes Event on the InferenceService, in plain words."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. Same snapshot, same plan; an unchanged world gives an empty one.

    `status` is the whole new status, or None when the present one is right already.
    Actions run in order (children first), then the status, then the notices.
    """

    actions: tuple[Action, ...] = ()
    status: Manifest | None = None
    notices: tuple[Notice, ...] = ()
    look_again_after_s: float | None = None
    wants_templates: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be written."""
        return not self.actions and self.status is None and not self.notices
