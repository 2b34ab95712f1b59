"""The conditions Available and Ready: each is the first value that an ordered chain of checks returns."""

from __future__ import annotations

from fleetkeeper.api.conditions import Reason
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.progress import limited_by_gpus, rolled_back_message, without_gpus
from fleetkeeper.reconcile.status.value import (
    Check,
    Value,
    because,
    false,
    first,
    paused,
    stopped,
    true,
)
from fleetkeeper.reconcile.strategy import CAPACITY_REASONS


def available(assessment: Assessment) -> Value:
    """Decide Available: the service's address has a ready endpoint."""
    return true(Reason.ANSWERING) if assessment.is_available else _not_available(assessment)


def _not_available(assessment: Assessment) -> Value:
    """Return the most important reason for being unavailable: the one to fix first."""
    return first(assessment, _WHY_NOT_AVAILABLE) or false(Reason.NO_READY_REPLICA)


def _no_router(assessment: Assessment) -> Value | None:
    if assessment.facts.ready_replicas == 0:
        return None
    problem = assessment.router_problem
    return because(problem) if problem else false(Reason.NO_READY_ROUTER)


def _blocked(assessment: Assessment) -> Value | None:
    return because(assessment.blocked) if assessment.blocked else None


def _stopped(assessment: Assessment) -> Value | None:
    return stopped(assessment) if assessment.is_stopped else None


def _failing(assessment: Assessment) -> Value | None:
    failure = assessment.rollout.failure or assessment.problem
    return because(failure) if failure else None


def _paused(assessment: Assessment) -> Value | None:
    return paused() if assessment.is_paused and not assessment.is_on_target else None


def _starting(assessment: Assessment) -> Value | None:
    """Report Starting from the first write on: a start changes the status once, not three times."""
    if assessment.is_waking:
        return false(Reason.WAKING)
    if assessment.is_swapping:
        return false(Reason.SWAPPING)
    is_wanted = assessment.replicas is not None and assessment.replicas.value > 0
    return false(Reason.STARTING) if is_wanted or assessment.facts.engine_pods else None


def ready(assessment: Assessment) -> Value:
    """Decide Ready: the service is available, rolled out, and has enough ready replicas."""
    return first(assessment, _WHY_READY_OR_NOT) or false(Reason.NOT_ROLLED_OUT)


def _resting(assessment: Assessment) -> Value | None:
    """Report a service that sleeps or wakes as ready: that is as specified, and GitOps tools stay green."""
    if assessment.blocked is not None or assessment.rollout.failure is not None:
        return None
    is_waking = assessment.is_waking and not assessment.is_available
    if not assessment.is_asleep and not is_waking:
        return None
    message = assessment.sleep.message if assessment.sleep is not None else ""
    if assessment.sleep is not None and assessment.sleep.failures:
        return false(Reason.WAKE_FAILED, message)
    return true(Reason.WAKING) if is_waking else true(assessment.rest_reason, message)


def _swapping(assessment: Assessment) -> Value | None:
    """Report a service that is unavailable only because its replica is replaced as ready.

    Its successor finds no accelerator until the old pod has drained. Any other problem counts.
    """
    if not assessment.is_swapping or assessment.is_available or assessment.is_stopped:
        return None
    if assessment.blocked or assessment.rollout.failure or assessment.rollout.rollback:
        return None
    problem = assessment.problem
    is_failing = problem is not None and problem.reason not in CAPACITY_REASONS
    return None if is_failing else true(Reason.SWAPPING)


def _silent(assessment: Assessment) -> Value | None:
    return None if assessment.is_available else _not_available(assessment)


def _blocked_since_change(assessment: Assessment) -> Value | None:
    """Decide Ready for a blocked service. The block does not clear an earlier Ready=True."""
    if assessment.blocked is None:
        return None
    is_as_before = assessment.was_ready and not assessment.is_new_generation
    return true(Reason.ENOUGH_READY) if is_as_before else because(assessment.blocked)


def _rolled_back(assessment: Assessment) -> Value | None:
    return (
        false(Reason.ROLLED_BACK, rolled_back_message(assessment))
        if assessment.rollout.rollback
        else None
    )


def _rolled_out(assessment: Assessment) -> Value | None:
    return _ready_by_count(assessment) if assessment.is_rolled_out else None


def _failed(assessment: Assessment) -> Value | None:
    failure = assessment.rollout.failure or assessment.prefetch.problem
    return because(failure) if failure else None


def _refused(assessment: Assessment) -> Value | None:
    return because(assessment.write_problem) if assessment.write_problem else None


def _rolling_out_while_ready(assessment: Assessment) -> Value | None:
    text = "The service answers requests while the current generation is being rolled out."
    return true(Reason.ROLLING_OUT, text) if assessment.was_ready else None


def _ready_by_count(assessment: Assessment) -> Value:
    count = assessment.facts.ready_replicas
    desired = assessment.replicas.value if assessment.replicas else 0
    if count >= desired:
        return true(Reason.ALL_READY)
    if count >= assessment.needed_replicas:
        return true(Reason.ENOUGH_READY)
    return (
        because(assessment.problem)
        if assessment.problem
        else false(Reason.MINIMUM_REPLICAS_UNAVAILABLE)
    )


_WHY_NOT_AVAILABLE: tuple[Check, ...] = (
    _no_router,
    _blocked,
    _stopped,
    _failing,
    _paused,
    without_gpus,
    _starting,
)
_WHY_READY_OR_NOT: tuple[Check, ...] = (
    _resting,
    _swapping,
    _silent,
    _blocked_since_change,
    _stopped,
    _rolled_back,
    _rolled_out,
    _failed,
    _refused,
    _paused,
    _rolling_out_while_ready,
    _failing,
    limited_by_gpus,
)
"""Checked in this order; the first check that returns a value decides."""
