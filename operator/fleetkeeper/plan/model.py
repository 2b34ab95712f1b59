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

from fleetkeeper.plan.budget import UNBOUNDED, Allowance

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
    """A Deployment: what decisions need beyond its identity.

    `template_hash` is our annotation on the live pod template ("" when it is missing),
    `desired_replicas` the live `spec.replicas`, `replicas_manager` the field manager that set it
    last, `max_surge` the live `spec.strategy.rollingUpdate.maxSurge` where it is a number,
    `accelerators` what one pod of the live template asks for.
    """

    generation: int = 0
    observed_generation: int = 0
    template_hash: str = ""
    desired_replicas: int = 1
    replicas_manager: str = ""
    max_surge: int | None = None
    accelerators: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    conditions: tuple[ObjectCondition, ...] = ()


@dataclass(frozen=True, slots=True)
class Revision:
    """A ReplicaSet of the engine Deployment.

    `number` is its `deployment.kubernetes.io/revision` annotation: Kubernetes raises it when an old
    ReplicaSet is used again, so the highest is the one of the live template. `template_hash` is our
    annotation on its pod template. `created` is the creation of the object, not of its last use.
    """

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
    """A pod of a service: a dozen fields.

    `revision_uid` is the UID of its controller (a ReplicaSet), `ready_since` the last transition of
    its Ready condition while it is True, `ejected_since` the time at which a container that runs and
    had started took the pod out of service by its own readiness (None otherwise), `unschedulable` the
    message of PodScheduled=False with reason Unschedulable ("" otherwise), `deletion_cost` the annotation
    `controller.kubernetes.io/pod-deletion-cost` (0 when absent), `accelerators` what it asks for.
    """

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
    ejected_since: float | None = None
    scheduled: bool = False
    unschedulable: str = ""
    deleting: bool = False
    deletion_cost: int = 0
    accelerators: int = 0
    containers: tuple[Container, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """A Warning event of Kubernetes about one of our pods (read only when `wants_events` asks)."""

    pod_uid: str
    reason: str
    message: str
    seen: float = 0.0


class WriteProblem(StrEnum):
    """Why the API server did not take a write (closed; the adapter maps its answers to these).

    CONFLICT means one thing: a `create_only` apply found an object of somebody else under that name.
    A 409 on a resourceVersion is no failure: the key is queued again and planned anew.
    """

    CONFLICT = "Conflict"
    QUOTA = "QuotaExceeded"
    ADMISSION = "AdmissionDenied"
    INVALID = "Invalid"
    FORBIDDEN = "Forbidden"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    UNAVAILABLE = "Unavailable"


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """The last write of a child that failed and has not succeeded since.

    `since` is the time of the first failure in a row, `tried` that of the last attempt, `digest` that
    of the refused apply ("" for other writes). The planner asks for the same write again no sooner
    than 30 s after `tried`, and for another one at once.
    """

    kind: str
    name: str
    problem: WriteProblem
    message: str
    since: float
    tried: float = 0.0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class UnreadableObject:
    """An object of the service that is there and cannot be read; `why` says what of it."""

    kind: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """What the arbitration over all services ordered for this one.

    `reason` is CamelCase from a closed set, `message` says it in plain words with its figures:
    "queue wait p95 1.9 s against 0.5 s, batch at its limit". No order at all means hold.
    """

    replicas: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Defect:
    """An unexpected error of Fleetkeeper itself at one service.

    `where` names the step that raised, `error` the type of the exception.
    """

    where: str
    error: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one decision about one service may know.

    `resource` is the InferenceService as the API server holds it (its metadata, spec and status;
    managedFields dropped).
    `children` holds, by (kind, name), what carries our labels or bears a name that a child would
    take and was read by name.
    `revisions` and `pods` are those of the engine Deployment and of all components.
    `failures` holds the writes that failed last time, by child.
    `templates` holds, by ReplicaSet name, the pod templates asked for by `Plan.wants_templates`,
    without the label pod-template-hash; `events` the Warning events asked for by
    `Plan.wants_events`, of those pods.
    `foreign_replica_writes` holds (when, field manager) of changes of the engine Deployment's
    `spec.replicas` by others in the last 10 minutes.
    `settled_since` is since when the caches have been complete (None: they are not).
    `status_written` is when this process last wrote the status, `children_written` when it last wrote
    a child (None: not yet).
    `gpu_allowance` is what the GPU budget leaves to this service.
    `order` is the arbitrated order, None to hold. `control_status` holds what the control loop
    reports, None when it has not ticked: the status pieces `scaling`, `batching`, `breaker`,
    `memory`, `remedy` and `decisions`, each as it shall stand in the status (an absent piece is
    dropped), and `conditions`, a list of {type, status, reason, message} for the types that it owns.
    `pod_load` holds, by pod name, the sequences that run and wait there (absent: unknown).
    `unreadable` names objects of this service that are there and cannot be read: of those that could be
    read before, the records above hold the last good state, and nothing may be concluded from the
    absence of the others.
    `crd_missing` names the fields of our schema that the live CRD lacks. `may_update_engine` is this
    service's turn to take a newer profile where engineUpdates is Automatic. `control_pending`: there
    is a control loop, and it has not judged this service since the process started. `defect` is an error of
    Fleetkeeper itself at this service.
    """

    resource: Manifest
    children: Mapping[tuple[Kind, str], Child] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    pods: tuple[Pod, ...] = ()
    failures: tuple[WriteFailure, ...] = ()
    templates: Mapping[str, Manifest] = field(default_factory=dict)
    events: tuple[ObjectEvent, ...] = ()
    foreign_replica_writes: tuple[tuple[float, str], ...] = ()
    settled_since: float | None = None
    status_written: float | None = None
    children_written: float | None = None
    gpu_allowance: Allowance = UNBOUNDED
    order: ReplicaOrder | None = None
    control_status: Manifest | None = None
    control_pending: bool = False
    pod_load: Mapping[str, float] = field(default_factory=dict)
    unreadable: tuple[UnreadableObject, ...] = ()
    crd_missing: tuple[str, ...] = ()
    may_update_engine: bool = False
    defect: Defect | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child. Without `force` a foreign owner of a field is a conflict.

    `create_only`: the child is believed absent, and the write is one that the API server refuses
    where an object has that name. Then the object is read: one of this service (our owner UID, or our
    labels and no controller) goes into `Snapshot.children` and is planned anew, any other becomes a
    `WriteFailure` CONFLICT.
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
    `wants_templates` names ReplicaSets whose pod template, and `wants_events` pods (by UID) whose
    Warning events shall be in the next snapshot: the runtime reads them and plans again at once,
    once for each name; it may keep templates (immutable) and drops events after a minute.
    """

    actions: tuple[Action, ...] = ()
    status: Manifest | None = None
    notices: tuple[Notice, ...] = ()
    look_again_after_s: float | None = None
    wants_templates: tuple[str, ...] = ()
    wants_events: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be written."""
        return not self.actions and self.status is None and not self.notices
