"""The conditions of a service: each is a small pure function of one reconcile's findings.

A message contains nothing that changes by itself (no counts, no times), so a condition is written
only when its meaning changes. `lastTransitionTime` changes only when the status flips.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api import rfc3339
from fleetkeeper.api.conditions import (
    MESSAGE_MAX_LENGTH,
    ONLY_WHEN_TRUE,
    ConditionType,
    Reason,
    Status,
    previous_condition,
)
from fleetkeeper.api.types import OnFailure, ScalingMode
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.replicas import ReplicaDecision
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.defect import defect_message


@dataclass(frozen=True, slots=True)
class Value:
    """A condition without its times."""

    status: Status
    reason: Reason
    message: str


REPORTED_BY_CONTROL_LOOP = frozenset(
    {
        Reason.CONTROL_BREAKER_OPEN,
        Reason.LOAD_BREAKER_OPEN,
        Reason.REMEDY_IN_FORCE,
        Reason.ENGINE_HUNG,
    }
)
"""Reasons of Degraded for which the control loop itself records the events, with figures."""

_Check = Callable[[Assessment], Value | None]


def _true(reason: Reason, message: str = "") -> Value:
    return Value(Status.TRUE, reason, message or reason.text)


def _false(reason: Reason, message: str = "") -> Value:
    return Value(Status.FALSE, reason, message or reason.text)


def _because(problem: Problem) -> Value:
    return _false(problem.reason, problem.message)


def decide_conditions(assessment: Assessment, now: float) -> list[dict[str, Any]]:
    """Return all conditions in the order of `ConditionType`.

    A condition in `ONLY_WHEN_TRUE` is left out unless it is True.
    """
    reported = []
    for kind, decide in _DECISIONS.items():
        value = decide(assessment)
        if value is not None and (value.status is Status.TRUE or kind not in ONLY_WHEN_TRUE):
            reported.append(_to_status(kind, value, assessment, now))
    return reported


def _first(assessment: Assessment, checks: tuple[_Check, ...]) -> Value | None:
    """Return the first value that a check returns, None if every check returns None."""
    return next((value for check in checks if (value := check(assessment)) is not None), None)


def _to_status(
    kind: ConditionType, value: Value, assessment: Assessment, now: float
) -> dict[str, Any]:
    """Return the condition as it is written to the status."""
    before = previous_condition(assessment.previous, kind)
    has_flipped = before is None or before.get("status") != value.status
    since = None if before is None or has_flipped else before.get("lastTransitionTime")
    return {
        "type": str(kind),
        "status": str(value.status),
        "observedGeneration": assessment.generation,
        "lastTransitionTime": since or rfc3339.format(now),
        "reason": str(value.reason),
        "message": value.message[:MESSAGE_MAX_LENGTH],
    }


def available(assessment: Assessment) -> Value:
    """Decide Available: the service's address has a ready endpoint."""
    return _true(Reason.ANSWERING) if assessment.is_available else _not_available(assessment)


def _not_available(assessment: Assessment) -> Value:
    """Return the most important reason for being unavailable: the one to fix first."""
    return _first(assessment, _WHY_NOT_AVAILABLE) or _false(Reason.NO_READY_REPLICA)


def _no_router(assessment: Assessment) -> Value | None:
    if assessment.facts.ready_replicas == 0:
        return None
    problem = assessment.router_problem
    return _because(problem) if problem else _false(Reason.NO_READY_ROUTER)


def _blocked(assessment: Assessment) -> Value | None:
    return _because(assessment.blocked) if assessment.blocked else None


def _stopped(assessment: Assessment) -> Value | None:
    return _false(Reason.STOPPED, _STOPPED) if assessment.is_stopped else None


def _failing(assessment: Assessment) -> Value | None:
    failure = assessment.rollout.failure or assessment.problem
    return _because(failure) if failure else None


def _paused(assessment: Assessment) -> Value | None:
    return (
        _false(Reason.PAUSED, _PAUSED)
        if assessment.is_paused and not assessment.is_on_target
        else None
    )


def _starting(assessment: Assessment) -> Value | None:
    """Report Starting from the first write on: a start changes the status once, not three times."""
    is_wanted = assessment.replicas is not None and assessment.replicas.value > 0
    return _false(Reason.STARTING) if is_wanted or assessment.facts.engine_pods else None


def _limited(assessment: Assessment) -> Value | None:
    """Return GPUBudget if the budget allows fewer replicas than are asked for."""
    replicas = assessment.replicas
    if replicas is None or not replicas.limited_by:
        return None
    return _false(Reason.GPU_BUDGET, _limit_in_words(replicas))


def _limit_in_words(replicas: ReplicaDecision) -> str:
    advice = "Request fewer replicas, free GPUs, or raise the GPU budget."
    return say(replicas.limit_in_words[:1].upper() + replicas.limit_in_words[1:], "", advice)


def _without_gpus(assessment: Assessment) -> Value | None:
    """Return GPUBudget if the budget allows no replica at all."""
    is_empty = (
        assessment.replicas is not None
        and assessment.replicas.value == 0
        and not assessment.facts.engine_pods
    )
    return _limited(assessment) if is_empty else None


_PAUSED = (
    "spec.paused is true, so Fleetkeeper does not change the service. Set it to false to resume."
)
_STOPPED = "spec.replicas is 0. Raise it to start the service."
_PINNED = "Autoscaling is off: spec.replicas is set. To remove it:"
"""Followed by a command, which with the longest names leaves 61 characters for this text."""


def ready(assessment: Assessment) -> Value:
    """Decide Ready: the service is available, rolled out, and has enough ready replicas."""
    return _first(assessment, _WHY_READY_OR_NOT) or _false(Reason.NOT_ROLLED_OUT)


def _silent(assessment: Assessment) -> Value | None:
    return None if assessment.is_available else _not_available(assessment)


def _blocked_since_change(assessment: Assessment) -> Value | None:
    """Decide Ready for a blocked service. The block does not clear an earlier Ready=True."""
    if assessment.blocked is None:
        return None
    is_as_before = assessment.was_ready and not assessment.is_new_generation
    return _true(Reason.ENOUGH_READY) if is_as_before else _because(assessment.blocked)


def _rolled_back(assessment: Assessment) -> Value | None:
    return (
        _false(Reason.ROLLED_BACK, rolled_back_message(assessment))
        if assessment.rollout.rollback
        else None
    )


def _rolled_out(assessment: Assessment) -> Value | None:
    return _ready_by_count(assessment) if assessment.is_rolled_out else None


def _failed(assessment: Assessment) -> Value | None:
    return _because(assessment.rollout.failure) if assessment.rollout.failure else None


def _refused(assessment: Assessment) -> Value | None:
    return _because(assessment.write_problem) if assessment.write_problem else None


def _rolling_out_while_ready(assessment: Assessment) -> Value | None:
    text = "The service answers requests while the current generation is being rolled out."
    return _true(Reason.ROLLING_OUT, text) if assessment.was_ready else None


def _ready_by_count(assessment: Assessment) -> Value:
    count = assessment.facts.ready_replicas
    desired = assessment.replicas.value if assessment.replicas else 0
    if count >= desired:
        return _true(Reason.ALL_READY)
    if count >= assessment.needed_replicas:
        return _true(Reason.ENOUGH_READY)
    return (
        _because(assessment.problem)
        if assessment.problem
        else _false(Reason.MINIMUM_REPLICAS_UNAVAILABLE)
    )


def progressing(assessment: Assessment) -> Value:
    """Decide Progressing: a rollout, a start or a change of replicas is in progress."""
    held = _standing_still(assessment)
    if held:
        return held
    facts = assessment.facts
    wanted = assessment.replicas.value if assessment.replicas else facts.live_replicas or 0
    if not assessment.is_on_target and not (wanted == 0 and not facts.engine_pods):
        return _true(Reason.ROLLING_OUT if facts.ready_replicas else Reason.STARTING)
    return _moving_count(assessment, wanted)


def _standing_still(assessment: Assessment) -> Value | None:
    """Return why no progress is possible, None if progress is possible."""
    if assessment.blocked:
        return _because(assessment.blocked)
    if assessment.is_paused:
        return _false(Reason.PAUSED, _PAUSED)
    if assessment.rollout.failure and not assessment.rollout.rollback:
        return _because(assessment.rollout.failure)
    if assessment.rollout.rollback and assessment.is_on_target:
        return _false(Reason.ROLLED_BACK, rolled_back_message(assessment))
    return None


def _moving_count(assessment: Assessment, wanted: int) -> Value:
    pods = len(assessment.facts.engine_pods)
    if pods > wanted:
        return _true(Reason.SCALING_DOWN)
    if wanted > 0 and assessment.facts.ready_replicas == 0:
        return _true(Reason.STARTING)
    if pods < wanted:
        return _true(Reason.SCALING_UP)
    if assessment.facts.ready_replicas < wanted:
        return _true(Reason.SCALING_UP, Reason.STARTING.text)
    if wanted == 0:
        return _without_gpus(assessment) or _false(Reason.STOPPED)
    return _false(Reason.ROLLED_OUT)


def reconciling(assessment: Assessment) -> Value | None:
    """Decide Reconciling: a generation is not rolled out yet. Autoscaling does not set it."""
    if assessment.is_rolled_out or stalled(assessment) is not None or assessment.is_paused:
        return None
    return _true(Reason.ROLLING_OUT, Reason.NOT_ROLLED_OUT.text)


def stalled(assessment: Assessment) -> Value | None:
    """Decide Stalled: no progress without a change of the spec or the cluster."""
    if assessment.blocked:
        return _true(assessment.blocked.reason, assessment.blocked.message)
    if assessment.rollout.rollback:
        return _true(Reason.ROLLED_BACK, rolled_back_message(assessment))
    if assessment.rollout.failure:
        return _stalled_by_failure(assessment, assessment.rollout.failure)
    refused = assessment.write_problem or (
        None if assessment.is_available else assessment.creation_problem
    )
    if refused:
        return _true(refused.reason, refused.message)
    return None


def _stalled_by_failure(assessment: Assessment, failure: Problem) -> Value:
    """Return RolloutHeld if onFailure is Hold and a replica is ready, else the failure's reason."""
    is_hold = (
        assessment.service is not None
        and assessment.service.spec.rollout.on_failure is OnFailure.HOLD
    )
    if is_hold and assessment.facts.ready_replicas:
        text = say("The rollout failed and was stopped", f"{failure.reason}: {failure.message}")
        return _true(Reason.ROLLOUT_HELD, text)
    return _true(failure.reason, failure.message)


def rolled_back_message(assessment: Assessment) -> str:
    """Return the message of a rollback with its cause, "" if there is no rollback."""
    rollback = assessment.rollout.rollback
    if rollback is None:
        return ""
    cause = f"{rollback.reason}: {rollback.message}"
    return say("Rolled back to the last good revision", cause, "Change the spec to try again.")


def degraded(assessment: Assessment) -> Value:
    """Decide Degraded: the service is available, but does not work as specified."""
    if assessment.defect is not None:
        return _true(Reason.INTERNAL_ERROR, defect_message(assessment.defect))
    # The control loop evaluates only services with a readable spec and an engine Deployment. Only
    # for these can it clear an earlier InternalError.
    will_be_judged = assessment.service is not None and assessment.facts.engine is not None
    failed = _pending(assessment, {Reason.INTERNAL_ERROR}) if will_be_judged else None
    return failed or _degraded(assessment)


def _pending(assessment: Assessment, reasons: Collection[Reason]) -> Value | None:
    """Return the previous Degraded with one of these reasons until the control loop evaluates it.

    A new operator process has no measurements: a condition that it cleared now might have to be
    written again by the first tick.
    """
    if not assessment.control_pending:
        return None
    before = _parsed(previous_condition(assessment.previous, ConditionType.DEGRADED))
    return before if before is not None and before.reason in reasons else None


def _degraded(assessment: Assessment) -> Value:
    if assessment.replicas and assessment.replicas.contested_by:
        return _true(
            Reason.REPLICAS_CONTESTED,
            f"{assessment.replicas.contested_by} keeps changing spec.replicas of the engine Deployment, "
            "so Fleetkeeper no longer changes it back. "
            "Point it at the InferenceService instead, then change its spec.",
        )
    if not assessment.is_available:
        return _false(
            Reason.NO_READY_REPLICA,
            "The service is unavailable. See the condition Available for the cause.",
        )
    if assessment.rollout.rollback:
        return _true(Reason.ROLLED_BACK, rolled_back_message(assessment))
    by_control, by_pods = (
        _from_control(assessment, ConditionType.DEGRADED),
        _degraded_by_pods(assessment),
    )
    by_control = by_control or _pending(assessment, REPORTED_BY_CONTROL_LOOP)
    if by_control is None or by_control.status is not Status.TRUE:
        return by_pods
    # Failing replicas are the cause of the overload of the others: report the cause.
    is_effect = by_control.reason is Reason.LOAD_BREAKER_OPEN and by_pods.status is Status.TRUE
    return by_pods if is_effect else by_control


def _degraded_by_pods(assessment: Assessment) -> Value:
    refused = assessment.write_problem or assessment.creation_problem
    if refused:
        return _true(refused.reason, refused.message)
    failing = (
        assessment.rollout.failure
        or assessment.problem
        or assessment.flapping
        or assessment.router_problem
    )
    if failing:
        text = f"{failing.reason}: {failing.message}"
        return _true(Reason.SOME_REPLICAS_FAILING, text)
    ejected = sorted(
        pod.name for pod in assessment.facts.engine_pods if pod.ejected_since is not None
    )
    if ejected:
        what = "Pods run but fail their readiness probe, so they get no requests"
        text = say(what, ", ".join(ejected), "Read their logs.")
        return _true(Reason.PODS_EJECTED, text)
    return _false(Reason.AS_EXPECTED)


def scaling_limited(assessment: Assessment) -> Value:
    """Decide ScalingLimited: bounds, a pin or the GPU budget prevent the wanted replicas."""
    if assessment.service is None or assessment.replicas is None:
        return _kept(assessment, ConditionType.SCALING_LIMITED, Reason.PENDING)
    spec, name = assessment.service.spec, assessment.service.name
    if assessment.replicas.limited_by:
        return _true(Reason.GPU_BUDGET, _limit_in_words(assessment.replicas))
    if spec.scaling.mode is ScalingMode.EXTERNAL:
        return _false(Reason.EXTERNAL)
    if spec.replicas is not None:
        undo = """'[{"op":"remove","path":"/spec/replicas"}]'"""
        command = (
            f"kubectl patch fis {name} -n {assessment.service.namespace} --type json -p {undo}"
        )
        return _true(Reason.REPLICAS_PINNED, f"{_PINNED} {command}")
    if assessment.replicas.is_scale_up_blocked:
        return _true(Reason.SCALE_UP_BLOCKED)
    first = Reason.ADVISORY if spec.scaling.mode is ScalingMode.ADVISORY else Reason.WITHIN_BOUNDS
    by_control = _from_control(assessment, ConditionType.SCALING_LIMITED)
    if by_control is None and assessment.control_pending and not assessment.is_new_generation:
        by_control = _parsed(previous_condition(assessment.previous, ConditionType.SCALING_LIMITED))
    return by_control or _false(first)


def _by_control(kind: ConditionType, first: Reason) -> Callable[[Assessment], Value]:
    """Return a function that returns the control loop's condition, the previous one, or Unknown."""

    def decide(assessment: Assessment) -> Value:
        return _from_control(assessment, kind) or _kept(assessment, kind, first)

    return decide


def _kept(assessment: Assessment, kind: ConditionType, first: Reason) -> Value:
    """Return the condition from the status, Unknown if there is none yet."""
    before = previous_condition(assessment.previous, kind)
    return _parsed(before) or Value(Status.UNKNOWN, first, first.text)


def _from_control(assessment: Assessment, kind: ConditionType) -> Value | None:
    for condition in assessment.control.conditions if assessment.control else ():
        if condition.type is kind:
            return Value(condition.status, condition.reason, condition.message)
    return None


def _parsed(condition: Mapping[str, Any] | None) -> Value | None:
    """Parse a condition of a status, None if its status or reason is unknown to this version."""
    if condition is None:
        return None
    try:
        return Value(
            Status(str(condition.get("status"))),
            Reason(str(condition.get("reason"))),  # type: ignore[call-arg]
            str(condition.get("message") or ""),
        )
    except ValueError:
        return None


_DECISIONS: Mapping[ConditionType, Callable[[Assessment], Value | None]] = {
    ConditionType.AVAILABLE: available,
    ConditionType.READY: ready,
    ConditionType.PROGRESSING: progressing,
    ConditionType.RECONCILING: reconciling,
    ConditionType.STALLED: stalled,
    ConditionType.DEGRADED: degraded,
    ConditionType.METRICS_AVAILABLE: _by_control(ConditionType.METRICS_AVAILABLE, Reason.PENDING),
    ConditionType.METRICS_COMPATIBLE: _by_control(ConditionType.METRICS_COMPATIBLE, Reason.PENDING),
    ConditionType.MEMORY_WITHIN_CAP: _by_control(
        ConditionType.MEMORY_WITHIN_CAP, Reason.NOT_MEASURED
    ),
    ConditionType.SCALING_LIMITED: scaling_limited,
}

_WHY_NOT_AVAILABLE: tuple[_Check, ...] = (
    _no_router,
    _blocked,
    _stopped,
    _failing,
    _paused,
    _without_gpus,
    _starting,
)
_WHY_READY_OR_NOT: tuple[_Check, ...] = (
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
    _limited,
)
"""Checked in this order; the first check that returns a value decides."""
