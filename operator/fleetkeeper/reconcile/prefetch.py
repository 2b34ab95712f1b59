"""The download of a new model before the engines are replaced.

Without it, a replica that is replaced occupies its accelerators while it downloads. With a cache that
the replicas share, one Job downloads first, and the engine Deployment keeps its template until then:

    live model ──another model──► Job ──Complete──► new template ──► the Job is removed
                                   └──Failed──► the old replicas serve, until the Job or the spec changes

Everything follows from the snapshot. The live template names the model that it was written for, so an
upgrade of the operator downloads nothing. A Job cannot change, so another one replaces it if it would.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import Component, prefetch_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.activation import activation_of
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.last_good import LastGood
from fleetkeeper.reconcile.manifests.engine_document import model_of
from fleetkeeper.reconcile.manifests.model_volumes import loaded_model
from fleetkeeper.reconcile.manifests.prefetch import desired_prefetch_job, shares_cache
from fleetkeeper.reconcile.observe.pod_problems import engine_line, problem_of_pod
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.rollout import RolloutDecision
from fleetkeeper.reconcile.types import Job, Kind, ObjectCondition, Pod, Snapshot
from fleetkeeper.reconcile.wanted import Wanted

OLD_IMAGE = "PodFailurePolicy"
"""Kubernetes' reason for a Job that ended with `NO_SUCH_COMMAND`: its image cannot download beforehand."""
DEADLINE = "DeadlineExceeded"
"""Kubernetes' reason for a Job that did not end within activeDeadlineSeconds."""


@dataclass(frozen=True, slots=True)
class PrefetchDecision:
    """The Job that must exist, and whether the engines wait for it.

    `job` is its manifest, None if nothing is to be downloaded. While `holds`, the engine Deployment
    keeps the template of the ReplicaSet `revision`. `message` says what is in progress, and `problem`
    why it failed.
    """

    job: Manifest | None = None
    holds: bool = False
    revision: str | None = None
    message: str = ""
    problem: Problem | None = None


def decide_prefetch(
    inputs: ReconcileInputs, wanted: Wanted, rollout: RolloutDecision, last_good: LastGood | None
) -> PrefetchDecision:
    """Decide whether the wanted model must be downloaded first, and how far that is."""
    if rollout.rollback is not None or not _is_needed(inputs, wanted, last_good):
        return PrefetchDecision()
    job = desired_prefetch_job(wanted.service, wanted.template)
    live = inputs.snapshot.children.get((Kind.JOB, prefetch_name(wanted.service.name)))
    is_same = isinstance(live, Job) and not live.deleting and live.digest == digest_of(job)
    end = live.end if isinstance(live, Job) and is_same else None
    if end is not None and (end.type == "Complete" or end.reason == OLD_IMAGE):
        return PrefetchDecision(job)
    pods = _pods_of(inputs.snapshot, live.uid) if live is not None and is_same else []
    current = inputs.facts.current
    return PrefetchDecision(
        job,
        holds=True,
        revision=current.name if current else None,
        message="" if end else _progress(wanted.service, pods),
        problem=_failure(wanted.service, end, pods) if end else None,
    )


def _is_needed(inputs: ReconcileInputs, wanted: Wanted, last_good: LastGood | None) -> bool:
    """Return True if a replica would be replaced by one that loads another model from a shared cache.

    A template that was good or has a ready replica has loaded its model before.
    """
    spec, facts = wanted.service.spec, inputs.facts
    engine = facts.engine
    if engine is None or not engine.model or engine.desired_replicas == 0:
        return False
    if spec.paused or activation_of(spec, is_asleep=parse_sleep(inputs.status).is_asleep).is_off:
        return False
    if not shares_cache(loaded_model(spec, wanted.profile)):
        return False
    if engine.model == model_of(wanted.template["spec"]):
        return False
    known = facts.revision_with(wanted.template_hash)
    was_good = last_good is not None and last_good.template_hash == wanted.template_hash
    return known is None or not (was_good or known.ready_replicas)


def _pods_of(snapshot: Snapshot, job_uid: str) -> list[Pod]:
    """Return the pods of the Job, the newest first."""
    own = [
        pod
        for pod in snapshot.pods
        if pod.component == Component.PREFETCH and pod.revision_uid == job_uid
    ]
    return sorted(own, key=lambda pod: (pod.created, pod.name), reverse=True)


def _progress(service: InferenceService, pods: list[Pod]) -> str:
    """Return what is in progress. Its length in seconds is not part of it: each would be a write."""
    what = f"Job {prefetch_name(service.name)} downloads the model before replicas are replaced"
    problem = problem_of_pod(pods[0]) if pods else None
    state = f"its pod is {pods[0].phase if pods else 'not created yet'}"
    advice = f"It may take {service.spec.rollout.startup_seconds} s (rollout.startupSeconds)."
    return say(what, problem.message if problem else state, advice)


def _failure(service: InferenceService, end: ObjectCondition, pods: list[Pod]) -> Problem:
    advice = f"Change spec.model, or delete Job {prefetch_name(service.name)} to try again."
    what = "The model was not downloaded, so the old replicas keep serving"
    return Problem(Reason.PREFETCH_FAILED, say(what, _why(service, end, pods), advice))


def _why(service: InferenceService, end: ObjectCondition, pods: list[Pod]) -> str:
    """Return the newest pod's own words, else Kubernetes'."""
    if end.reason == DEADLINE:
        limit = service.spec.rollout.startup_seconds
        return f"it took more than {limit} s (rollout.startupSeconds)"
    for pod in pods:
        ends = [item.terminated for item in pod.containers if item.terminated is not None]
        for line in (engine_line(item.message) for item in ends if item.exit_code):
            if line.get("message"):
                return f"{line.get('class')}: {line['message']}"
        problem = problem_of_pod(pod)
        if problem is not None:
            return problem.message
    return end.message or end.reason
