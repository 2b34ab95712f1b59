"""Services in the states that the status reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fleetkeeper.api.conditions import (
    Reason,
)
from fleetkeeper.reconcile.types import (
    Child,
    Container,
    Kind,
    ObjectCondition,
    Termination,
    UnreadableObject,
    WriteFailure,
    WriteProblem,
)
from tests.support.reconcile.plan_cluster import settle, step
from tests.support.reconcile.plan_world import (
    START,
    World,
    act,
    new_world,
    plan_of,
)

ENGINE = (Kind.DEPLOYMENT, "chat")


RESTING = settle(new_world(routing={"policy": "None"}))


ROUTED = settle(new_world())


def condition_of(world: World, kind: str) -> dict[str, Any]:
    """A condition of the status as it would stand after the next plan."""
    world = replace(world, status_written=None, children_written=None)
    plan = plan_of(world)
    status = plan.status or plan_of(act(world, replace(plan, status=None))).status or world.status
    (found,) = [item for item in status["conditions"] if item["type"] == kind]
    return dict(found)


def with_pod(state: dict[str, Any], **pod: Any) -> World:
    """A new service whose one engine pod is in this state."""
    world = step(
        act(new_world(routing={"policy": "None"}), plan_of(new_world(routing={"policy": "None"}))),
        1,
    )
    broken = [
        replace(
            item,
            ready=False,
            **{"scheduled": True, **pod},
            containers=(Container("engine", **state),),
        )
        for item in world.pods
    ]
    return replace(world, pods=tuple(broken))


def ended(code: int, death: str, reason: str = "Error") -> World:
    """A new service whose engine ended so."""
    line = json.dumps(
        {"class": death, "code": code, "phase": "start", "message": "m", "detail": ""}
    )
    end = Termination(code, reason, line, START)
    return with_pod({"waiting_reason": "CrashLoopBackOff", "last_terminated": end, "restarts": 3})


def refused(problem: WriteProblem, message: str) -> World:
    """A new service of which a child was refused a moment ago."""
    world = new_world()
    failure = WriteFailure("Deployment", "chat", problem, message, START, START)
    return replace(world, failures=(failure,))


def forbidden_pods(message: str) -> World:
    """A new service whose pods the API server refuses."""
    world = step(act(new_world(), plan_of(new_world())), 1)
    condition = ObjectCondition("ReplicaFailure", "True", "FailedCreate", message)
    deployment = replace(world.engine, conditions=(condition,))
    return replace(world, pods=(), children={**world.children, ENGINE: deployment})


def foreign_deployment() -> World:
    """A new service with the name of an existing foreign Deployment."""
    return replace(new_world(), children={ENGINE: Child(Kind.DEPLOYMENT, "chat", "u", "1", "d")})


NO_ACCOUNT = (
    'pods "chat-x" is forbidden: error looking up service account team-a/reader: '
    'serviceaccount "reader" not found'
)
REACHED: dict[Reason, World] = {
    Reason.IMAGE_PULL: with_pod({"waiting_reason": "ErrImagePull", "waiting_message": "no"}),
    Reason.UNSCHEDULABLE: with_pod(
        {}, scheduled=False, unschedulable="0/1 nodes are available: 1 Insufficient cpu."
    ),
    Reason.INSUFFICIENT_GPU: with_pod(
        {}, scheduled=False, unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    ),
    Reason.MISSING_VOLUME: with_pod(
        {}, scheduled=False, unschedulable='persistentvolumeclaim "models" not found'
    ),
    Reason.MISSING_SECRET: with_pod(
        {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf" not found'}
    ),
    Reason.MISSING_SERVICE_ACCOUNT: forbidden_pods(NO_ACCOUNT),
    Reason.IMAGE_VOLUMES_UNSUPPORTED: refused(
        WriteProblem.INVALID,
        'Deployment.apps "chat" is invalid: spec.template.spec.volumes[4]: Required value: must specify a volume type',
    ),
    Reason.MODEL_NOT_FOUND: ended(66, "ModelNotFound"),
    Reason.MODEL_NOT_READABLE: ended(77, "ModelNotReadable"),
    Reason.BAD_ENGINE_OPTION: ended(64, "BadEngineOption"),
    Reason.UNSUPPORTED_ARCHITECTURE: ended(69, "UnsupportedArchitecture"),
    Reason.CUDA_OUT_OF_MEMORY: ended(72, "CUDAOutOfMemory"),
    Reason.HOST_OUT_OF_MEMORY: ended(137, "Unknown", "OOMKilled"),
    Reason.ENGINE_HUNG: ended(75, "Hung"),
    Reason.CRASH_LOOP: ended(70, "Unknown"),
    Reason.QUOTA_EXCEEDED: forbidden_pods('pods "x" is forbidden: exceeded quota: gpus'),
    Reason.ADMISSION_DENIED: refused(WriteProblem.ADMISSION, "denied the request: no"),
    Reason.NAME_CONFLICT: foreign_deployment(),
    Reason.UNKNOWN_PROFILE: new_world(engine={"profile": "tpu"}),
    Reason.CRD_TOO_OLD: replace(new_world(), crd_missing=("spec.breaker",)),
    Reason.UNREADABLE_OBJECT: replace(
        new_world(), unreadable=(UnreadableObject("Deployment", "chat", "spec.replicas"),)
    ),
    Reason.INVALID_SPEC: new_world(model={"source": "s3://bucket/model"}),
    Reason.STOPPED: new_world(replicas=0),
    Reason.SUSPENDED: new_world(suspend=True),
    Reason.PAUSED: new_world(paused=True),
    Reason.NAMESPACE_TERMINATING: refused(WriteProblem.NAMESPACE_TERMINATING, "being deleted"),
}
SUSPENDED = {Reason.PAUSED, Reason.STOPPED, Reason.SUSPENDED}
RECOVERS = {
    Reason.IMAGE_PULL,
    Reason.UNSCHEDULABLE,
    Reason.INSUFFICIENT_GPU,
    Reason.MISSING_VOLUME,
    Reason.MISSING_SECRET,
}
"""Causes that may go away by themselves in the first minutes, so they are not Stalled yet."""


def next_resource(world: World) -> dict[str, Any]:
    """The object as it stands after the next plans."""
    for _ in range(2):
        plan = plan_of(world)
        if plan.status is not None:
            return {**world.resource, "status": plan.status}
        world = act(world, plan)
    return {**world.resource, "status": world.status}
