"""A small world for plans: Kubernetes as far as a plan can see it, as immutable values.

`act(world, plan)` is the executor and the API server, `plan_cluster.step(world, seconds)` the
Deployment controller, the scheduler and the kubelet. Only these change a world, and none is random.
A template's behaviour says what its pods do, so a bad revision is one line of a test.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from fleetkeeper.api import names
from fleetkeeper.common.budget import UNBOUNDED, Allowance, accelerators_of
from fleetkeeper.common.sleep import NO_WAKE, NOT_IDLE, Idle, Wake
from fleetkeeper.common.values import ControlReport, Manifest, ReplicaAllocation, StartProgress
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.manifests.engine_document import model_of
from fleetkeeper.reconcile.plan import Apply, Delete, MarkPod, Plan
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import (
    Child,
    Job,
    Kind,
    Pod,
    Revision,
    Snapshot,
    UnreadableObject,
    Workload,
    WriteFailure,
    WriteProblem,
)

START = 1_800_000_000.0
UID = "uid-of-chat"


class Behaviour(StrEnum):
    """The behavior of a template's pods."""

    READY = "ready"
    BAD_OPTION = "exits 64"
    OUT_OF_MEMORY = "exits 72"
    BAD_IMAGE = "cannot pull"
    SILENT = "never ready"


@dataclass(frozen=True)
class World:
    """The cluster around one service. `gpus` is the number of pods that fit."""

    resource: Manifest
    now: float = START
    children: Mapping[tuple[Kind, str], Child] = field(default_factory=dict)
    manifests: Mapping[tuple[Kind, str], Manifest] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    pods: tuple[Pod, ...] = ()
    templates: Mapping[str, Manifest] = field(default_factory=dict)
    behaviours: Mapping[str, Behaviour] = field(default_factory=dict)
    next_behaviour: Behaviour = Behaviour.READY
    failures: tuple[WriteFailure, ...] = ()
    foreign_writes: tuple[tuple[float, str], ...] = ()
    wanted_templates: tuple[str, ...] = ()
    status_written: float | None = None
    children_written: float | None = None
    allocation: ReplicaAllocation | None = None
    control_report: ControlReport | None = None
    load: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, StartProgress] = field(default_factory=dict)
    allowance: Allowance = UNBOUNDED
    idle: Idle = NOT_IDLE
    wake: Wake = NO_WAKE
    crd_missing: tuple[str, ...] = ()
    unreadable: tuple[UnreadableObject, ...] = ()
    gpus: int = 1000
    serial: int = 1
    context: PlanContext = field(default_factory=default_context)
    writes: tuple[str, ...] = ()
    status_writes: int = 0

    @property
    def status(self) -> dict[str, Any]:
        """Return the status as written."""
        found: dict[str, Any] = self.resource.get("status", {})
        return found

    @property
    def engine(self) -> Workload:
        """Return the engine Deployment."""
        found = self.children[Kind.DEPLOYMENT, self.resource["metadata"]["name"]]
        assert isinstance(found, Workload)
        return found

    @property
    def ready(self) -> int:
        """Return the number of ready engine pods."""
        return sum(pod.ready for pod in self.pods if pod.component == names.Component.ENGINE)

    def condition(self, kind: str) -> tuple[str, str] | None:
        """Return (status, reason) of a condition, None if it is absent."""
        for item in self.status.get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"]
        return None

    def snapshot(self) -> Snapshot:
        """Return the planner's snapshot."""
        return Snapshot(
            resource=copy.deepcopy(self.resource),
            children=self.children,
            revisions=self.revisions,
            pods=self.pods,
            failures=self.failures,
            templates={
                name: self.templates[name]
                for name in self.wanted_templates
                if name in self.templates
            },
            foreign_replica_writes=self.foreign_writes,
            status_written=self.status_written,
            children_written=self.children_written,
            allocation=self.allocation,
            control_report=self.control_report,
            pod_load=self.load,
            starts=self.starts,
            gpu_allowance=self.allowance,
            idle=self.idle,
            wake=self.wake,
            crd_missing=self.crd_missing,
            unreadable=self.unreadable,
        )


def service(**spec: Any) -> Manifest:
    """Return an InferenceService `chat` in namespace `team-a`, created now, without a status."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": "chat",
            "namespace": "team-a",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {"model": {"source": "pvc://models/llama"}, **spec},
    }


def new_world(**spec: Any) -> World:
    """Return a world with a service and nothing else."""
    return World(resource=service(**spec))


def with_spec(world: World, **changes: Any) -> World:
    """Change the spec as a user. The generation grows if it differs; None removes a key."""
    spec = {**world.resource["spec"], **changes}
    spec = {key: value for key, value in spec.items() if value is not None}
    if spec == world.resource["spec"]:
        return world
    metadata = {**world.resource["metadata"]}
    metadata["generation"] += 1
    return replace(world, resource={**world.resource, "metadata": metadata, "spec": spec})


def plan_of(world: World) -> Plan:
    """Return the planner's decision."""
    return decide_plan(world.snapshot(), world.context, world.now)


# -- the executor and the API server ----------------------------------------------------------------


def act(world: World, plan: Plan) -> World:
    """Execute a plan until a precondition fails, like a 409."""
    for action in plan.actions:
        done = _act(world, action)
        if done is None:
            return world
        world = replace(done, children_written=world.now)
    if plan.status is not None:
        world = replace(
            world,
            resource={**world.resource, "status": copy.deepcopy(plan.status)},
            status_written=world.now,
            writes=(*world.writes, "status"),
            status_writes=world.status_writes + 1,
        )
    return replace(world, wanted_templates=(*world.wanted_templates, *plan.wants_templates))


def _act(world: World, action: Apply | Delete | MarkPod) -> World | None:
    if isinstance(action, MarkPod):
        pods = tuple(
            replace(pod, deletion_cost=action.deletion_cost) if pod.uid == action.uid else pod
            for pod in world.pods
        )
        return replace(world, pods=pods, writes=(*world.writes, f"mark {action.name}"))
    if isinstance(action, Delete):
        return _delete(world, action)
    return _apply(world, action)


def _delete(world: World, action: Delete) -> World | None:
    key = (Kind(action.kind), action.name)
    child = world.children.get(key)
    if child is None or child.uid != action.uid:
        return None
    if child.resource_version != action.resource_version:
        return None
    assert not (key[0] is Kind.DEPLOYMENT and action.name == "chat"), "the engines were deleted"
    return replace(
        without_child(world, key), writes=(*world.writes, f"delete {action.kind} {action.name}")
    )


def _apply(world: World, action: Apply) -> World | None:
    key = (action.kind, action.name)
    live = world.children.get(key)
    manifest = action.manifest
    assert manifest["metadata"]["namespace"] == world.resource["metadata"]["namespace"]
    if action.create_only and live is not None:
        return replace(world, failures=(*world.failures, _conflict(world, action)))
    if action.resource_version and (
        live is None or live.resource_version != action.resource_version
    ):
        return None
    world = replace(world, serial=world.serial + 1)
    child = Child(
        kind=action.kind,
        name=action.name,
        uid=live.uid if live else f"uid-{world.serial}",
        resource_version=str(world.serial),
        digest=action.digest,
        controller_uid=UID,
        service="chat",
    )
    if action.kind is Kind.DEPLOYMENT:
        child = _deployment(child, live, manifest)
    if action.kind is Kind.JOB:
        assert live is None, "a Job cannot change"
        child = Job(**{item.name: getattr(child, item.name) for item in fields(Child)})
    return replace(
        world,
        children={**world.children, key: child},
        manifests={**world.manifests, key: manifest},
        failures=tuple(
            item for item in world.failures if (item.kind, item.name) != (action.kind, action.name)
        ),
        writes=(*world.writes, f"{action.why} {action.kind} {action.name}"),
    )


def _conflict(world: World, action: Apply) -> WriteFailure:
    return WriteFailure(
        action.kind, action.name, WriteProblem.CONFLICT, "taken", world.now, world.now
    )


def _deployment(child: Child, live: Child | None, manifest: Manifest) -> Workload:
    spec = manifest["spec"]
    before = live if isinstance(live, Workload) else None
    generation = (before.generation if before else 0) + 1
    return Workload(
        kind=child.kind,
        name=child.name,
        uid=child.uid,
        resource_version=child.resource_version,
        digest=child.digest,
        controller_uid=child.controller_uid,
        service=child.service,
        generation=generation,
        observed_generation=before.observed_generation if before else 0,
        template_hash=spec["template"]["metadata"]["annotations"][names.ANNOTATION_TEMPLATE_HASH],
        image=spec["template"]["spec"]["containers"][0]["image"],
        model=model_of(spec["template"]["spec"]),
        desired_replicas=spec["replicas"],
        replicas_manager=names.FIELD_MANAGER,
        max_surge=_known_surge(spec["strategy"]["rollingUpdate"]["maxSurge"]),
        accelerators=accelerators_of(spec["template"]["spec"]),
    )


def _known_surge(surge: int | str) -> int | None:
    if isinstance(surge, int):
        return surge
    return 0 if surge == "0%" else None


def without_child(world: World, key: tuple[Kind, str]) -> World:
    """Delete a child as a user, with the pods of a Deployment."""
    child = world.children[key]
    children = {name: item for name, item in world.children.items() if name != key}
    revisions = tuple(item for item in world.revisions if item.deployment_uid != child.uid)
    gone = {item.uid for item in world.revisions} - {item.uid for item in revisions}
    component = world.manifests[key]["metadata"]["labels"][names.LABEL_COMPONENT]
    is_router = key[0] is Kind.DEPLOYMENT and component == names.Component.ROUTER
    pods = tuple(
        pod
        for pod in world.pods
        if pod.revision_uid not in gone and not (is_router and pod.component == component)
    )
    return replace(world, children=children, revisions=revisions, pods=pods)


def edited(world: World, key: tuple[Kind, str], **changes: Any) -> World:
    """Edit a child as a user."""
    child = replace(world.children[key], resource_version=str(world.serial + 1), **changes)
    return replace(world, children={**world.children, key: child}, serial=world.serial + 1)
