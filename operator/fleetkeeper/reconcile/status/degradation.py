"""The condition Degraded: from the children, the pods, and the facts that the control loop reports."""

from __future__ import annotations

from collections.abc import Collection

from fleetkeeper.api.conditions import ConditionType, Reason, previous_condition
from fleetkeeper.common.values import CAUSE_UNKNOWN, ControlReport
from fleetkeeper.reconcile.observe.problem import say
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.defect import defect_message
from fleetkeeper.reconcile.status.progress import rolled_back_message
from fleetkeeper.reconcile.status.value import Value, false, parsed, true

REPORTED_BY_CONTROL_LOOP = frozenset(
    {
        Reason.CONTROL_BREAKER_OPEN,
        Reason.LOAD_BREAKER_OPEN,
        Reason.REMEDY_IN_FORCE,
        Reason.ENGINE_HUNG,
    }
)
"""Reasons of Degraded for which the control loop itself records the events, with figures."""

KEPT_UNTIL_MEASURED = REPORTED_BY_CONTROL_LOOP | {Reason.GRANTS_NOT_DEMANDED}
"""Reasons of Degraded that follow from measurements, which a new process does not have yet."""


def degraded(assessment: Assessment) -> Value:
    """Decide Degraded: the service is available, but does not work as specified."""
    if assessment.defect is not None:
        return true(Reason.INTERNAL_ERROR, defect_message(assessment.defect))
    # The control loop evaluates only services with a readable spec and an engine Deployment. Only
    # for these can it clear an earlier InternalError.
    will_be_judged = assessment.service is not None and assessment.facts.engine is not None
    failed = None
    if assessment.control_pending and will_be_judged:
        failed = _previous(assessment, {Reason.INTERNAL_ERROR})
    return failed or _degraded(assessment)


def _previous(assessment: Assessment, reasons: Collection[Reason]) -> Value | None:
    """Return the previous Degraded with one of these reasons.

    A new operator process has no measurements: a condition that it cleared now might have to be
    written again by the first tick.
    """
    before = parsed(previous_condition(assessment.previous, ConditionType.DEGRADED))
    return before if before is not None and before.reason in reasons else None


def _degraded(assessment: Assessment) -> Value:
    if assessment.replicas and assessment.replicas.contested_by:
        return true(
            Reason.REPLICAS_CONTESTED,
            f"{assessment.replicas.contested_by} keeps changing spec.replicas of the engine Deployment, "
            "so Fleetkeeper no longer changes it back. "
            "Point it at the InferenceService instead, then change its spec.",
        )
    if not assessment.is_available:
        return false(
            Reason.NO_READY_REPLICA,
            "The service is unavailable. See the condition Available for the cause.",
        )
    if assessment.grants_problem:
        return true(assessment.grants_problem.reason, assessment.grants_problem.message)
    if assessment.rollout.rollback:
        return true(Reason.ROLLED_BACK, rolled_back_message(assessment))
    if assessment.prefetch.problem:
        return true(Reason.PREFETCH_FAILED, assessment.prefetch.problem.message)
    load, pods = _by_load(assessment), _by_pods(assessment)
    # Failing replicas are the cause of the overload of the others: report the cause.
    is_effect = load is not None and load.reason is Reason.LOAD_BREAKER_OPEN
    found = pods or load if is_effect else load or pods
    return found or false(Reason.AS_EXPECTED)


def _by_load(assessment: Assessment) -> Value | None:
    """Return the problem that the control loop reports, the previous one until it knows."""
    report = assessment.control
    if report is None:
        is_kept = assessment.control_pending
        return _previous(assessment, KEPT_UNTIL_MEASURED) if is_kept else None
    if report.safe_limits_cause == CAUSE_UNKNOWN:
        return _previous(assessment, {Reason.CONTROL_BREAKER_OPEN}) or by_load(report)
    return by_load(report)


def by_load(report: ControlReport) -> Value | None:
    """Return the most important problem that the control loop reports."""
    if report.safe_limits_cause:
        cause = report.safe_limits_cause[:1].upper() + report.safe_limits_cause[1:]
        text = f"{cause}; safe limits are in force, and no replica is removed."
        return true(Reason.CONTROL_BREAKER_OPEN, text)
    if report.shed_tiers:
        text = f"Overload: requests of these tiers are shed: {', '.join(report.shed_tiers)}."
        return true(Reason.LOAD_BREAKER_OPEN, text)
    remedy = report.remedy
    if remedy is not None:
        text = f"{remedy.reason}: engines start with at most {remedy.max_sequences} sequences and a memory cap of {remedy.cap_percent}%."
        return true(Reason.REMEDY_IN_FORCE, text)
    if report.hung_pods:
        text = f"Engines with work make no progress: {', '.join(report.hung_pods)}."
        return true(Reason.ENGINE_HUNG, text)
    if report.open_pods:
        text = (
            f"Engines accept requests without a grant: {', '.join(report.open_pods)}. "
            "Set an engine profile with a newer image."
        )
        return true(Reason.GRANTS_NOT_DEMANDED, text)
    return None


def _by_pods(assessment: Assessment) -> Value | None:
    refused = assessment.write_problem or assessment.creation_problem
    if refused:
        return true(refused.reason, refused.message)
    failing = (
        assessment.rollout.failure
        or assessment.lack
        or assessment.problem
        or assessment.flapping
        or assessment.router_problem
    )
    if failing:
        text = f"{failing.reason}: {failing.message}"
        return true(Reason.SOME_REPLICAS_FAILING, text)
    ejected = sorted(
        pod.name for pod in assessment.facts.engine_pods if pod.ejected_since is not None
    )
    if ejected:
        what = "Pods run but fail their readiness probe, so they get no requests"
        text = say(what, ", ".join(ejected), "Read their logs.")
        return true(Reason.PODS_EJECTED, text)
    return None
