"""The controllers, the scheduler and the kubelet of a `plan_world.World`, as pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, floor
from types import MappingProxyType

import pytest

from fleetkeeper.api import names
from fleetkeeper.reconcile import writes
from fleetkeeper.reconcile.context import RouterSettings
from fleetkeeper.reconcile.manifests.router import Router
from fleetkeeper.reconcile.manifests.vllm_router import DEFAULTS
from fleetkeeper.reconcile.types import Container, Kind, Pod, Revision, Termination, Workload
from tests.support.reconcile import plan_world
from tests.support.reconcile.plan_world import Behaviour, World, act

VLLM_ROUTER_IMAGE = "fleetkeeper-router:0.0.9"
READY_AFTER_S = 5.0
CRASH_EVERY_S = 20.0


def settled_with_vllm_router(resources: Mapping[str, str] = MappingProxyType({})) -> World:
    """Return a settled world of a release whose router was vllm-router."""
    before = RouterSettings.model_validate({"image": VLLM_ROUTER_IMAGE, **DEFAULTS, **resources})
    router = Router(before, is_vllm_router=True, watches_pods=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writes, "decide_router", lambda *_: router)
        return settle(plan_world.new_world())


def step(world: World, seconds: float) -> World:
    """Let the controllers work once, then time pass."""
    for key, child in tuple(world.children.items()):
        if isinstance(child, Workload):
            world = _roll_engine(world, child) if key[1] == "chat" else _roll_router(world, child)
    world = replace(world, now=world.now + seconds)
    return replace(world, pods=tuple(_kubelet(world)))


def _roll_router(world: World, router: Workload) -> World:
    others = tuple(pod for pod in world.pods if pod.component != names.Component.ROUTER)
    routers = [pod for pod in world.pods if pod.component == names.Component.ROUTER]
    old = [pod for pod in routers if pod.template_hash != router.template_hash]
    new = [pod for pod in routers if pod.template_hash == router.template_hash]
    new = new[: router.desired_replicas]
    while len(new) < router.desired_replicas:
        world = replace(world, serial=world.serial + 1)
        name = f"{router.name}-{world.serial}"
        pod = _new_pod(world, name, names.Component.ROUTER, None)
        new.append(replace(pod, template_hash=router.template_hash))
    own = [*(old if not all(pod.ready for pod in new) else ()), *new]
    ready = sum(pod.ready for pod in own)
    rolled = replace(
        router,
        observed_generation=router.generation,
        replicas=len(own),
        updated_replicas=len(new),
        ready_replicas=ready,
        available_replicas=ready,
    )
    children = {**world.children, (router.kind, router.name): rolled}
    return replace(world, pods=(*others, *own), children=children)


def _roll_engine(world: World, engine: Workload) -> World:
    """Do one pass of a rolling update like the Deployment controller."""
    world = _with_current_revision(world, engine)
    current = max(world.revisions, key=lambda item: item.number)
    rolling = world.manifests[Kind.DEPLOYMENT, "chat"]["spec"]["strategy"]["rollingUpdate"]
    wanted = engine.desired_replicas
    pods = [pod for pod in world.pods if pod.component == names.Component.ENGINE]
    new = [pod for pod in pods if pod.revision_uid == current.uid]
    old = [pod for pod in pods if pod.revision_uid != current.uid]
    surge, unavailable = _fenceposts(rolling, wanted)
    least = max(0, wanted - unavailable)
    spare = sum(pod.ready for pod in pods) - least
    kept_old, kept_new = [], sorted(new, key=_rank)[max(0, len(new) - wanted) :]
    for pod in sorted(old, key=_rank):
        if pod.ready and spare > 0:
            spare -= 1
        elif pod.ready or (spare < 0 and wanted > 0):
            kept_old.append(pod)
    if wanted == 0:
        kept_old = []
    room = wanted + (surge if kept_old else 0) - len(kept_old) - len(kept_new)
    while len(kept_new) < wanted and room > 0:
        world = replace(world, serial=world.serial + 1)
        pod = _new_pod(world, f"chat-{world.serial}", names.Component.ENGINE, current)
        kept_new.append(pod)
        room -= 1
    others = [pod for pod in world.pods if pod.component != names.Component.ENGINE]
    world = replace(world, pods=(*others, *kept_old, *kept_new))
    return _with_counts(world, engine, current, wanted)


def _fenceposts(rolling: dict[str, int | str], wanted: int) -> tuple[int, int]:
    """Return maxSurge and maxUnavailable in pods, as the Deployment controller resolves them."""

    def part(value: int | str) -> float:
        return value if isinstance(value, int) else int(value[:-1]) * wanted / 100

    surge, unavailable = ceil(part(rolling["maxSurge"])), floor(part(rolling["maxUnavailable"]))
    return (surge, unavailable) if surge or unavailable else (0, 1)


def _rank(pod: Pod) -> tuple[bool, int, float]:
    """Return the sort key of removal: unready first, then the lowest cost, then the youngest."""
    return (pod.ready, pod.deletion_cost, -pod.created)


def _with_current_revision(world: World, engine: Workload) -> World:
    """Use the ReplicaSet of the live template again, or create it."""
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
    """Yield every pod in its present state."""
    free = world.gpus - sum(
        pod.scheduled for pod in world.pods if pod.component == names.Component.ENGINE
    )
    for pod in world.pods:
        if pod.component == names.Component.PREFETCH:
            yield pod  # a test says what it does
            continue
        placed = pod
        if not pod.scheduled and pod.component == names.Component.ENGINE:
            if free <= 0:
                text = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: none"
                yield replace(pod, unschedulable=text)
                continue
            free -= 1
            placed = replace(pod, scheduled_since=world.now)
        yield _behave(world, replace(placed, scheduled=True, unschedulable="", ip="10.0.0.1"))


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
    """Let planner and cluster work for this time."""
    end = world.now + seconds
    while world.now < end:
        for _ in range(6):
            plan = plan_world.plan_of(world)
            if plan.is_empty and not plan.wants_templates:
                break
            world = act(world, plan)
        world = step(world, tick_s)
    return world


def settle(world: World, at_most_s: float = 2000.0) -> World:
    """Live until nothing is written for 80 s and no plan requeues.

    A plan that asks for ever (a contest) is at rest after 800 s without a write. Fails if never.
    """
    end, quiet = world.now + at_most_s, 0
    while quiet < 80:
        assert world.now < end, f"not settled after {at_most_s:g} s: {world.writes[-8:]}"
        before = len(world.writes)
        world = live(world, 10.0, 10.0)
        quiet = quiet + 1 if len(world.writes) == before else 0
        plan = plan_world.plan_of(world)
        if quiet >= 8 and plan.is_empty and plan.requeue_after_s is None:
            break
    return world
