"""The snapshot of one service: the records that the runtime keeps of Kubernetes objects.

A decision turns a `Snapshot` and the time into a `Plan`; both are values. The runtime's caches hold
these records instead of Kubernetes objects, because a Kubernetes object as Python dicts needs about
five times the memory of its JSON. Times are seconds since the epoch (float). Absent means unknown,
never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleetkeeper.common.budget import UNBOUNDED, Allowance
from fleetkeeper.common.nodes import ANY_NODE, NodeNeeds
from fleetkeeper.common.sleep import NO_WAKE, NOT_IDLE, Idle, Wake
from fleetkeeper.common.values import ControlReport, Manifest, ReplicaAllocation, StartProgress


class Kind(StrEnum):
    """The Kubernetes kinds of children."""

    DEPLOYMENT = "Deployment"
    SERVICE = "Service"
    SERVICE_ACCOUNT = "ServiceAccount"
    ROLE_BINDING = "RoleBinding"
    POD_DISRUPTION_BUDGET = "PodDisruptionBudget"
    CONFIG_MAP = "ConfigMap"
    NETWORK_POLICY = "NetworkPolicy"
    JOB = "Job"


@dataclass(frozen=True, slots=True)
class ObjectCondition:
    """A condition of another object (a Deployment or a pod), written by its controller."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """An object in the service's namespace that is or could be a child of the service.

    `digest` covers the fields that our field manager owns in the live object (by its managedFields)
    except `.spec.replicas`, with values in the API server's canonical form. It equals the
    `digest_of` a desired manifest if and only if an apply would change nothing.
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
    """A Deployment with the fields that decisions need.

    `template_hash` is our annotation on the live pod template ("" if it is missing),
    `desired_replicas` the live `spec.replicas`, `replicas_manager` the field manager that set it
    last, `max_surge` the live `spec.strategy.rollingUpdate.maxSurge` if it is a number or 0%,
    `accelerators` the number that one pod of the live template requests, `node_needs` what it needs of a
    node, and `image` the image of its first container. `model` is the model of the live template, as
    `model_of` names it.
    """

    generation: int = 0
    observed_generation: int = 0
    template_hash: str = ""
    desired_replicas: int = 1
    replicas_manager: str = ""
    max_surge: int | None = None
    accelerators: int = 0
    node_needs: NodeNeeds = ANY_NODE
    image: str = ""
    model: str = ""
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    conditions: tuple[ObjectCondition, ...] = ()


@dataclass(frozen=True, slots=True)
class Job(Child):
    """A Job. `end` is its condition Complete or Failed, None while it runs."""

    end: ObjectCondition | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    """A ReplicaSet of the engine Deployment.

    `number` is its `deployment.kubernetes.io/revision` annotation. Kubernetes raises it when an old
    ReplicaSet is used again, so the highest number belongs to the live template. `template_hash` is
    our annotation on its pod template. `created` is the creation time of the object, not the time
    of its last use.
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
    """The end of a container: Kubernetes' reason and the engine's own termination line."""

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
    running_since: float | None = None
    """Time of its start; None if it does not run."""
    terminated: Termination | None = None
    last_terminated: Termination | None = None


@dataclass(frozen=True, slots=True)
class SecretUse:
    """A variable of a pod whose value is a key of a Secret."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a service with the fields that decisions need.

    `revision_uid` is the UID of its controller (a ReplicaSet). `ready_since` is the last transition
    of its Ready condition while that is True. `ejected_since` is the time at which the readiness
    probe of a started and running container made the pod unready (None otherwise). `unschedulable`
    is the message of PodScheduled=False with reason Unschedulable ("" otherwise). `deletion_cost`
    is the annotation `controller.kubernetes.io/pod-deletion-cost` (0 if absent). `accelerators` is
    the number that the pod requests. `secret_uses` lists the variables that come from Secrets.
    `image_volumes` are the references of the images that it mounts. `has_claims` is True if the pod
    has ResourceClaims. `scheduled_since` and `deleting_since` are the times at which it got a node,
    and at which its deletion was requested.
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
    secret_uses: tuple[SecretUse, ...] = ()
    image_volumes: tuple[str, ...] = ()
    has_claims: bool = False
    scheduled_since: float | None = None
    deleting_since: float | None = None


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """A Kubernetes Warning event for one of our pods, read only if `Plan.wants_events` asks."""

    pod_uid: str
    reason: str
    message: str
    seen: float = 0.0


class WriteProblem(StrEnum):
    """Why the API server refused a write: a closed set, to which the adapter maps its responses.

    CONFLICT has one meaning: a `create_only` apply found another owner's object under that name.
    A 409 on a resourceVersion is not a failure: the service is requeued and planned again.
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

    `since` is the time of the first of the consecutive failures, `tried` that of the last attempt.
    `digest` is the digest of the refused apply ("" for other writes). The planner repeats the same
    write no sooner than 30 s after `tried`; a different write is due at once.
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
    """An object of the service that exists but cannot be read. `why` names the part that cannot."""

    kind: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Defect:
    """An unexpected error of Fleetkeeper itself for one service.

    `where` is the name of the step that raised, `error` the type of the exception.
    """

    where: str
    error: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All inputs of one decision about one service.

    - `resource` is the InferenceService from the API server: metadata without managedFields, spec
      and status.
    - `children` contains, by (kind, name), the objects that carry our labels, and the objects that
      were read because they have the name of a child.
    - `revisions` are those of the engine Deployment, `pods` those of all components.
    - `failures` are the failed writes of children that have not succeeded since.
    - `templates` contains, by ReplicaSet name, the pod templates that `Plan.wants_templates`
      requested, without the label pod-template-hash.
    - `events` are the Warning events of the pods that `Plan.wants_events` requested.
    - `foreign_replica_writes` are the changes of the engine Deployment's `spec.replicas` by others
      in the last 10 minutes, as (time, field manager).
    - `settled_since` is the time since which the caches are complete (None: they are not).
    - `status_written` and `children_written` are the times at which this process last wrote the
      status and a child (None: not yet).
    - `gpu_allowance` is the part of the GPU budget that is left to this service.
    - `allocation` is the replica allocation, None to leave the replicas unchanged.
    - `control_report` is the control loop's report, None before its first tick.
    - `control_pending` is true if there is a control loop that has not evaluated this service since
      the process started.
    - `pod_load` is the number of running and waiting sequences by pod name (absent: unknown).
    - `starts` is the progress of engines that start, by pod name (absent: unknown).
    - `idle` is what the control loop knows of the last request, and `wake` are the wake marks.
    - `unreadable` lists objects of this service that exist but cannot be read. For an object that
      could be read before, the records above have the last good state. The absence of any other
      object proves nothing.
    - `crd_missing` lists the fields of our schema that the live CRD lacks.
    - `may_update_engine` is true if this service may now take a newer profile where engineUpdates
      is Automatic.
    - `defect` is an error of Fleetkeeper itself for this service.
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
    allocation: ReplicaAllocation | None = None
    control_report: ControlReport | None = None
    control_pending: bool = False
    pod_load: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, StartProgress] = field(default_factory=dict)
    idle: Idle = NOT_IDLE
    wake: Wake = NO_WAKE
    unreadable: tuple[UnreadableObject, ...] = ()
    crd_missing: tuple[str, ...] = ()
    may_update_engine: bool = False
    defect: Defect | None = None
