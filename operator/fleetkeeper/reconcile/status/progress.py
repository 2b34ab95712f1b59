"""The conditions Progressing, Reconciling and Stalled: whether the service changes, and what stops it."""

from __future__ import annotations

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.types import OnFailure
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.value import (
    Value,
    because,
    false,
    gpu_limit_message,
    paused,
    stopped,
    true,
)


def progressing(assessment: Assessment) -> Value:
    """Decide Progressing: a rollout, a start or a change of replicas is in progress."""
    impossible = _without_progress(assessment)
    if impossible:
        return impossible
    waits = _waits(assessment)
    if waits:
        return waits
    facts = assessment.facts
    wanted = assessment.replicas.value if assessment.replicas else facts.live_replicas or 0
    if not assessment.is_on_target and not (wanted == 0 and not facts.engine_pods):
        return true(Reason.ROLLING_OUT if facts.ready_replicas else Reason.STARTING)
    return _count_progress(assessment, wanted)


def _without_progress(assessment: Assessment) -> Value | None:
    """Return why no progress is possible, None if progress is possible."""
    if assessment.blocked:
        return because(assessment.blocked)
    if assessment.is_paused:
        return paused()
    if assessment.rollout.failure and not assessment.rollout.rollback:
        return because(assessment.rollout.failure)
    if assessment.prefetch.problem:
        return because(assessment.prefetch.problem)
    if assessment.rollout.rollback and assessment.is_on_target:
        return false(Reason.ROLLED_BACK, rolled_back_message(assessment))
    return None


def _count_progress(assessment: Assessment, wanted: int) -> Value:
    pods = len(assessment.facts.engine_pods)
    if pods > wanted:
        return true(Reason.SCALING_DOWN)
    if wanted > 0 and assessment.facts.ready_replicas == 0:
        return true(Reason.STARTING)
    if pods < wanted:
        return true(Reason.SCALING_UP)
    if assessment.facts.ready_replicas < wanted:
        return true(Reason.SCALING_UP, Reason.STARTING.text)
    if wanted == 0:
        return without_gpus(assessment) or stopped(assessment)
    return false(Reason.ROLLED_OUT)


def reconciling(assessment: Assessment) -> Value | None:
    """Decide Reconciling: a generation is not rolled out yet. Autoscaling does not set it."""
    if assessment.is_rolled_out or stalled(assessment) is not None or assessment.is_paused:
        return None
    return _waits(assessment) or true(Reason.ROLLING_OUT, Reason.NOT_ROLLED_OUT.text)


def _waits(assessment: Assessment) -> Value | None:
    """Return why the new template is not written yet, None if it is."""
    if assessment.prefetch.holds:
        return true(Reason.PREFETCHING_MODEL, assessment.prefetch.message)
    if assessment.swap_problem:
        return true(assessment.swap_problem.reason, assessment.swap_problem.message)
    return None


def stalled(assessment: Assessment) -> Value | None:
    """Decide Stalled: no progress without a change of the spec or the cluster."""
    if assessment.blocked:
        return true(assessment.blocked.reason, assessment.blocked.message)
    if assessment.rollout.rollback:
        return true(Reason.ROLLED_BACK, rolled_back_message(assessment))
    if assessment.rollout.failure:
        return _stalled_by_failure(assessment, assessment.rollout.failure)
    if assessment.prefetch.problem:
        return true(Reason.PREFETCH_FAILED, assessment.prefetch.problem.message)
    refused = assessment.write_problem or (
        None if assessment.is_available else assessment.creation_problem
    )
    if refused:
        return true(refused.reason, refused.message)
    return None


def _stalled_by_failure(assessment: Assessment, failure: Problem) -> Value:
    """Return RolloutHeld if onFailure is Hold and a replica is ready, else the failure's reason."""
    is_hold = (
        assessment.service is not None
        and assessment.service.spec.rollout.on_failure is OnFailure.HOLD
    )
    if is_hold and assessment.facts.ready_replicas:
        text = say("The rollout failed and was stopped", f"{failure.reason}: {failure.message}")
        return true(Reason.ROLLOUT_HELD, text)
    return true(failure.reason, failure.message)


def rolled_back_message(assessment: Assessment) -> str:
    """Return the message of a rollback with its cause, "" if there is no rollback."""
    rollback = assessment.rollout.rollback
    if rollback is None:
        return ""
    cause = f"{rollback.reason}: {rollback.message}"
    return say("Rolled back to the last good revision", cause, "Change the spec to try again.")


def limited_by_gpus(assessment: Assessment) -> Value | None:
    """Return GPUBudget if the budget allows fewer replicas than are asked for."""
    replicas = assessment.replicas
    if replicas is None or not replicas.limited_by:
        return None
    return false(Reason.GPU_BUDGET, gpu_limit_message(replicas))


def without_gpus(assessment: Assessment) -> Value | None:
    """Return GPUBudget if the budget allows no replica at all."""
    is_empty = (
        assessment.replicas is not None
        and assessment.replicas.value == 0
        and not assessment.facts.engine_pods
    )
    return limited_by_gpus(assessment) if is_empty else None
