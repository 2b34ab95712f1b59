"""A small world for plans: Kubernetes as far as a plan can see it, as immutable values.

`act(world, plan)` is the executor and the API server, `step(world, seconds)` the Deployment
controller, the scheduler and the kubelet. Nothing here is random, and nothing writes but these.
What a pod does is told by its template's behaviour, so that a bad revision is one line of a test.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fleetkeeper.api import names
from fleetkeeper.common.budget import UNBOUNDED, Allowance, accelerators_of
from fleetkeeper.common.values import ControlReport, Manifest, ReplicaAllocation
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.plan import Apply, Delete, MarkPod, Plan
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import (
    Child,
    Container,
    Kind,
    Pod,
    Revision,
    Snapshot,
    Termination,
    UnreadableObject,
    Workload,
    WriteFailure,
    WriteProblem,
)

START = 1_800_000_000.0
READY_AFTER_S = 5.0
CRASH_EVERY_S = 20.0
UID = "uid-of-chat"


class Behaviour(StrEnum):
    """What the pods of a template do."""

    READY = "ready"
    BAD_OPTION = "exits 64"
    OUT_OF_MEMORY = "exits 72"
    BAD_IMAGE = "cannot pull"
    SILENT = "never ready"


@dataclass(frozen=True)
class World:
    """The cluster around one service. `gpus` is how many pods fit; `history` the plans so far."""

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
    allowance: Allowance = UNBOUNDED
    crd_missing: tuple[str, ...] = ()
    unreadable: tuple[UnreadableObject, ...] = ()
    gpus: int = 1000
    serial: int = 1
    context: PlanContext = field(default_factory=default_context)
    writes: tuple[str, ...] = ()
    status_writes: int = 0

    @property
    def status(self) -> dict[str, Any]:
        """The status as written."""
        found: dict[str, Any] = self.resource.get("status", {})
        return found

    @property
    def engine(self) -> Workload:
        """The engine Deployment."""
        found = self.children[Kind.DEPLOYMENT, self.resource["metadata"]["name"]]
        assert isinstance(found, Workload)
        return found

    @property
    def ready(self) -> int:
        """Ready engine pods."""
        return sum(pod.ready for pod in self.pods if pod.component == names.Component.ENGINE)

    def condition(self, kind: str) -> tuple[str, str] | None:
        """(status, reason) of a condition, None when it is absent."""
        for item in self.status.get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"]
        return None

    def snapshot(self) -> Snapshot:
        """What the planner sees."""
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
            gpu_allowance=self.allowance,
            crd_missing=self.crd_missing,
            unreadable=self.unreadable,
        )


def service(**spec: Any) -> Manifest:
    """An InferenceService `chat` in namespace `team-a`, created now, without a status."""
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
    """A world with a service and nothing else."""
    return World(resource=service(**spec))


def with_spec(world: World, **changes: Any) -> World:
    """Somebody changes the spec: the generation moves when it really differs; None removes a key."""
    spec = {**world.resource["spec"], **changes}
    spec = {key: value for key, value in spec.items() if value is not None}
    if spec == world.resource["spec"]:
        return world
    metadata = {**world.resource["metadata"]}
    metadata["generation"] += 1
    return replace(world, resource={**world.resource, "metadata": metadata, "spec": spec})


def plan_of(world: World) -> Plan:
    """What the planner decides now."""
    return decide_plan(world.snapshot(), world.context, world.now)


# -- the executor and the API server ----------------------------------------------------------------


def act(world: World, plan: Plan) -> World:
    """Carries a plan out; a precondition that does not hold stops it, as a 409 would."""
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
        desired_replicas=spec["replicas"],
        replicas_manager=names.FIELD_MANAGER,
        max_surge=spec["strategy"]["rollingUpdate"]["maxSurge"],
        accelerators=accelerators_of(spec["template"]["spec"]),
    )


def without_child(world: World, key: tuple[Kind, str]) -> World:
    """Somebody deletes a child; the pods of a Deployment go with it."""
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
    """Somebody edits a child."""
    child = replace(world.children[key], resource_version=str(world.serial + 1), **changes)
    return replace(world, children={**world.children, key: child}, serial=world.serial + 1)


# -- the controllers, the scheduler and the kubelet ---------------------------------------------------


def step(world: World, seconds: float) -> World:
    """Lets the cluster work, then time pass."""
    for key, child in tuple(world.children.items()):
        if isinstance(child, Workload):
            world = _roll_engine(world, child) if key[1] == "chat" else _roll_router(world, child)
    world = replace(world, now=world.now + seconds)
    return replace(world, pods=tuple(_kubelet(world)))


def _roll_router(world: World, router: Workload) -> World:
    others = tuple(pod for pod in world.pods if pod.component != names.Component.ROUTER)
    own = [pod for pod in world.pods if pod.component == names.Component.ROUTER]
    own = own[: router.desired_replicas]
    while len(own) < router.desired_replicas:
        world = replace(world, serial=world.serial + 1)
        own.append(_new_pod(world, f"{router.name}-{world.serial}", names.Component.ROUTER, None))
    return replace(world, pods=(*others, *own))


def _roll_engine(world: World, engine: Workload) -> World:
    """One pass of a rolling update, as the Deployment controller does it."""
    world = _with_current_revision(world, engine)
    current = max(world.revisions, key=lambda item: item.number)
    rolling = world.manifests[Kind.DEPLOYMENT, "chat"]["spec"]["strategy"]["rollingUpdate"]
    wanted = engine.desired_replicas
    pods = [pod for pod in world.pods if pod.component == names.Component.ENGINE]
    new = [pod for pod in pods if pod.revision_uid == current.uid]
    old = [pod for pod in pods if pod.revision_uid != current.uid]
    least = max(0, wanted - rolling["maxUnavailable"])
    spare = sum(pod.ready for pod in pods) - least
    kept_old, kept_new = [], sorted(new, key=_rank)[max(0, len(new) - wanted) :]
    for pod in sorted(old, key=_rank):
        if pod.ready and spare > 0:
            spare -= 1
        elif pod.ready or (spare < 0 and wanted > 0):
            kept_old.append(pod)
    if wanted == 0:
        kept_old = []
    room = wanted + (rolling["maxSurge"] if kept_old else 0) - len(kept_old) - len(kept_new)
    while len(kept_new) < wanted and room > 0:
        world = replace(world, serial=world.serial + 1)
        pod = _new_pod(world, f"chat-{world.serial}", names.Component.ENGINE, current)
        kept_new.append(pod)
        room -= 1
    others = [pod for pod in world.pods if pod.component != names.Component.ENGINE]
    world = replace(world, pods=(*others, *kept_old, *kept_new))
    return _with_counts(world, engine, current, wanted)


def _rank(pod: Pod) -> tuple[bool, int, float]:
    """The first goes first: not ready, then the cheapest, then the youngest."""
    return (pod.ready, pod.deletion_cost, -pod.created)


def _with_current_revision(world: World, engine: Workload) -> World:
    """The ReplicaSet of the live template: an old one is used again, else a new one is made."""
    number = max((item.number for item in world.revisions), default=0)
    found = [item for item in world.revisions if item.template_hash == engine.template_hash]
    if found and found[0].number == number:
        return world
    if found:
        again = replace(found[0], number=number + 1)
        others = tuple(item for item in world.revisions if item.uid != again.uid)
        return replace(world, revisions=(*others, again))
    serial = world.serial + 1
    revision = Revision(
        f"chat-rs{serial}",
        f"rs-{serial}",
        engine.uid,
        number + 1,
        engine.template_hash,
        world.now,
    )
    template = world.manifests[Kind.DEPLOYMENT, "chat"]["spec"]["template"]
    behaviours = {engine.template_hash: world.next_behaviour, **world.behaviours}
    return replace(
        world,
        serial=serial,
        revisions=(*world.revisions, revision),
        templates={**world.templates, revision.name: template},
        behaviours=behaviours,
    )


def _with_counts(world: World, engine: Workload, current: Revision, wanted: int) -> World:
    revisions = []
    for item in world.revisions:
        own = [pod for pod in world.pods if pod.revision_uid == item.uid]
        desired = wanted if item.uid == current.uid else len(own)
        ready = sum(pod.ready for pod in own)
        revisions.append(
            replace(item, desired_replicas=desired, replicas=len(own), ready_replicas=ready)
        )
    live = replace(engine, observed_generation=engine.generation)
    children = {**world.children, (Kind.DEPLOYMENT, "chat"): live}
    return replace(world, revisions=tuple(revisions), children=children)


def _new_pod(world: World, name: str, component: str, revision: Revision | None) -> Pod:
    return Pod(
        name=name,
        uid=f"pod-{world.serial}",
        service="chat",
        component=component,
        revision_uid=revision.uid if revision else None,
        template_hash=revision.template_hash if revision else "",
        created=world.now,
        containers=(Container("engine"),),
    )


def _kubelet(world: World) -> Iterator[Pod]:
    """Every pod as it is now."""
    free = world.gpus - sum(
        pod.scheduled for pod in world.pods if pod.component == names.Component.ENGINE
    )
    for pod in world.pods:
        placed = pod
        if not pod.scheduled and pod.component == names.Component.ENGINE:
            if free <= 0:
                text = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: none"
                yield replace(pod, unschedulable=text)
                continue
            free -= 1
        yield _behave(world, replace(placed, scheduled=True, unschedulable=""))


def _behave(world: World, pod: Pod) -> Pod:
    behaviour = world.behaviours.get(pod.template_hash, Behaviour.READY)
    age = world.now - pod.created
    if behaviour is Behaviour.READY:
        if age < READY_AFTER_S:
            return pod
        since = pod.ready_since if pod.ready else world.now
        return replace(
            pod,
            phase="Running",
            ready=True,
            ready_since=since,
            containers=(Container("engine", ready=True),),
        )
    pod = replace(pod, ready=False, ready_since=None)
    if behaviour is Behaviour.SILENT:
        return replace(pod, phase="Running")
    if behaviour is Behaviour.BAD_IMAGE:
        waiting = Container("engine", waiting_reason="ImagePullBackOff", waiting_message="no such")
        return replace(pod, containers=(waiting,))
    code, name = (
        (64, "BadEngineOption")
        if behaviour is Behaviour.BAD_OPTION
        else (
            72,
            "CUDAOutOfMemory",
        )
    )
    ends = int(age / CRASH_EVERY_S)
    if ends == 0:
        return replace(pod, phase="Running", containers=(Container("engine"),))
    line = f'{{"class": "{name}", "code": {code}, "phase": "start", "message": "it said so", "detail": ""}}'
    end = Termination(code, "Error", line, world.now)
    crashed = Container(
        "engine", restarts=ends, waiting_reason="CrashLoopBackOff", last_terminated=end
    )
    return replace(pod, phase="Running", containers=(crashed,))


def live(world: World, seconds: float, tick_s: float = 5.0) -> World:
    """Planner and cluster work side by side for some time."""
    end = world.now + seconds
    while world.now < end:
        for _ in range(6):
            plan = plan_of(world)
            if plan.is_empty and not plan.wants_templates:
                break
            world = act(world, plan)
        world = step(world, tick_s)
    return world


def settle(world: World, at_most_s: float = 2000.0) -> World:
    """Lives until nothing is written for 80 s and no plan asks to be looked at again.

    A plan that asks for ever (a contest) is at rest after 800 s without a write. Fails if never.
    """
    end, quiet = world.now + at_most_s, 0
    while quiet < 80:
        assert world.now < end, f"not settled after {at_most_s:g} s: {world.writes[-8:]}"
        before = len(world.writes)
        world = live(world, 10.0, 10.0)
        quiet = quiet + 1 if len(world.writes) == before else 0
        plan = plan_of(world)
        if quiet >= 8 and plan.is_empty and plan.requeue_after_s is None:
            break
    return world
