"""The problems of a service's pods and writes, collected once for rollout and status."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.conditions import Reason
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.pod_problems import (
    ADVICE,
    FLAPPING_S,
    SET_UP_S,
    flapping_problem,
    lacks_image_volumes,
    needs_events,
    problem_of_creation,
    problem_of_pod,
)
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.types import Pod, Snapshot, Workload, WriteFailure, WriteProblem


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The problems of a service, oldest pod first.

    `engine_problems` lists the problems of the current revision before those of older revisions.
    `current_problems` lists those of the current revision only, including its refused pod creation.
    `by_pod` lists them with the pods' names. `wants_events` contains the UIDs of pods whose Warning
    events are needed for a diagnosis.
    """

    engine_problems: tuple[Problem, ...] = ()
    current_problems: tuple[Problem, ...] = ()
    by_pod: tuple[tuple[str, Problem], ...] = ()
    router_problem: Problem | None = None
    creation_problem: Problem | None = None
    write_problem: Problem | None = None
    flapping: Problem | None = None
    wants_events: tuple[str, ...] = ()
    again_after_s: float | None = None


def decide_diagnosis(snapshot: Snapshot, facts: Facts, now: float) -> Diagnosis:
    """Diagnose all pods and writes of the service."""
    found = [
        (pod, problem_of_pod(pod, snapshot.events) or _claims_problem(pod, now))
        for pod in facts.engine_pods
    ]
    problems = [(pod, problem) for pod, problem in found if problem is not None]
    current = {pod.name for pod in facts.pods_of(facts.current)}
    of_current = [problem for pod, problem in problems if pod.name in current]
    of_older = [problem for pod, problem in problems if pod.name not in current]
    creation = _failed_creation(facts.engine, facts.current.created if facts.current else None)
    routers = [problem_of_pod(pod, snapshot.events) for pod in facts.router_pods]
    router = next((problem for problem in routers if problem), None)
    pods = (*facts.engine_pods, *facts.router_pods)
    flapping = [flapping_problem(pod, now) for pod in facts.engine_pods]
    return Diagnosis(
        engine_problems=(*of_current, *of_older),
        current_problems=(*of_current, *([creation] if creation else [])),
        by_pod=tuple((pod.name, problem) for pod, problem in problems),
        router_problem=router or _failed_creation(facts.router, None),
        creation_problem=creation,
        write_problem=_write_problem(snapshot),
        flapping=next((problem for problem in flapping if problem), None),
        wants_events=_wanted_events(pods, snapshot, now),
        again_after_s=min(
            (*_until_set_up(pods, now), *_until_forgiven(facts.engine_pods, now)), default=None
        ),
    )


def _wanted_events(pods: tuple[Pod, ...], snapshot: Snapshot, now: float) -> tuple[str, ...]:
    known = {event.pod_uid for event in snapshot.events}
    return tuple(pod.uid for pod in pods if pod.uid not in known and needs_events(pod, now))


def _claims_problem(pod: Pod, now: float) -> Problem | None:
    """Return the problem of a pod that the scheduler does not consider, because a claim is missing.

    There is neither a verdict nor, for a claim by name, an event.
    """
    if not _waits_for_claims(pod) or now - pod.created < SET_UP_S:
        return None
    what = f"Pod {pod.name}: The scheduler waits for a ResourceClaim of the pod"
    advice = "Check that the claims and templates in spec.resources.claims exist."
    return Problem(Reason.UNSCHEDULABLE, say(what, "", advice), pod.created)


def _waits_for_claims(pod: Pod) -> bool:
    return pod.has_claims and not (pod.scheduled or pod.unschedulable or pod.deleting)


def _until_set_up(pods: tuple[Pod, ...], now: float) -> list[float]:
    """Return, for each pod being set up, the seconds until it has taken too long."""
    return [
        pod.created + SET_UP_S - now
        for pod in pods
        if (_waits_for_claims(pod) or (pod.scheduled and not pod.ready))
        and now - pod.created < SET_UP_S
    ]


def _until_forgiven(pods: tuple[Pod, ...], now: float) -> list[float]:
    """Return, for each ready pod that kept terminating, the seconds until it counts as stable."""
    return [
        container.last_terminated.finished + FLAPPING_S - now
        for pod in pods
        if flapping_problem(pod, now)
        for container in pod.containers
        if container.last_terminated
        and container.last_terminated.finished is not None
        and container.last_terminated.finished + FLAPPING_S > now
    ]


def _write_problem(snapshot: Snapshot) -> Problem | None:
    """Return the first problem that keeps a child from being written."""
    problems = (_of_failure(failure) for failure in snapshot.failures)
    return next((problem for problem in problems if problem), None)


def _failed_creation(workload: Workload | None, since: float | None) -> Problem | None:
    """Return the refused pod creation that the Deployment reports as ReplicaFailure."""
    for condition in workload.conditions if workload else ():
        if condition.type == "ReplicaFailure" and condition.status == "True":
            return problem_of_creation(condition.message, since)
    return None


def _of_failure(failure: WriteFailure) -> Problem | None:
    """Return the problem of a refused write.

    Name conflicts are reported with the children. Outages of the API server are not reported.
    """
    if failure.problem in {WriteProblem.QUOTA, WriteProblem.ADMISSION}:
        return problem_of_creation(failure.message, failure.since)
    if failure.problem is WriteProblem.INVALID and lacks_image_volumes(failure.message):
        reason = Reason.IMAGE_VOLUMES_UNSUPPORTED
        what = f"The API server does not accept the image volume of {failure.kind} {failure.name}"
        return Problem(reason, say(what, failure.message, ADVICE[reason]), failure.since)
    words = {
        WriteProblem.INVALID: (
            Reason.INVALID_SPEC,
            "was rejected as invalid by the API server",
            "Change the spec.",
        ),
        WriteProblem.FORBIDDEN: (
            Reason.WRITE_FAILED,
            "cannot be written because the operator lacks the permission",
            "Check the operator's RBAC role.",
        ),
        WriteProblem.NAMESPACE_TERMINATING: (
            Reason.NAMESPACE_TERMINATING,
            "cannot be written: the namespace is being deleted",
            "",
        ),
    }
    if failure.problem not in words:
        return None
    reason, what, advice = words[failure.problem]
    text = say(f"{failure.kind} {failure.name} {what}", failure.message, advice)
    return Problem(reason, text, failure.since)
