"""A condition without its times, and the functions that the conditions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.replicas import ReplicaDecision
from fleetkeeper.reconcile.status.assessment import Assessment


@dataclass(frozen=True, slots=True)
class Value:
    """A condition without its times."""

    status: Status
    reason: Reason
    message: str


Check = Callable[[Assessment], Value | None]


def true(reason: Reason, message: str = "") -> Value:
    """Return True with this message, by default the reason's text."""
    return Value(Status.TRUE, reason, message or reason.text)


def false(reason: Reason, message: str = "") -> Value:
    """Return False with this message, by default the reason's text."""
    return Value(Status.FALSE, reason, message or reason.text)


def because(problem: Problem) -> Value:
    """Return False because of this problem."""
    return false(problem.reason, problem.message)


def first(assessment: Assessment, checks: tuple[Check, ...]) -> Value | None:
    """Return the first value that a check returns, None if every check returns None."""
    return next((value for check in checks if (value := check(assessment)) is not None), None)


def parsed(condition: Mapping[str, Any] | None) -> Value | None:
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


def kept(assessment: Assessment, kind: ConditionType, unknown: Reason) -> Value:
    """Return the condition from the status, Unknown if there is none yet."""
    before = previous_condition(assessment.previous, kind)
    return parsed(before) or Value(Status.UNKNOWN, unknown, unknown.text)


def paused() -> Value:
    """Return False because spec.paused is true."""
    text = "spec.paused is true, so Fleetkeeper does not change the service. Set it to false to resume."
    return false(Reason.PAUSED, text)


def stopped(assessment: Assessment) -> Value:
    """Return False because spec.suspend, spec.replicas or its sleep stopped the service."""
    if assessment.is_asleep:
        return false(assessment.rest_reason)
    if assessment.is_suspended:
        text = "spec.suspend is true. Set it to false to start the service again with the replicas that it had."
        return false(Reason.SUSPENDED, text)
    return false(Reason.STOPPED, "spec.replicas is 0. Raise it to start the service.")


def gpu_limit_message(replicas: ReplicaDecision) -> str:
    """Return which GPU budget limits the replicas, and what to do."""
    advice = "Request fewer replicas, free GPUs, or raise the GPU budget."
    return say(replicas.limit_in_words[:1].upper() + replicas.limit_in_words[1:], "", advice)
