"""The outcome of a plan, and the failures of its writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import structlog

from fleetkeeper.adapters.kubernetes.refusals import problem_of
from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.reconcile.plan import Action, Apply, Delete
from fleetkeeper.reconcile.types import WriteFailure, WriteProblem
from fleetkeeper.runtime.queue import Key
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """The outcome of a plan."""

    key: Key
    failures: dict[tuple[str, str], WriteFailure]
    written: int = 0
    plan_again: bool = False
    """True to plan again now, because an assumption of the plan was wrong: a child already exists,
    a write was refused, or the service is not as planned."""
    wait: bool = False
    """True to retry after a back-off of at least `retry_after_s`, because the cache is behind the
    server or the server is unavailable."""
    confirmed: float = -math.inf
    """Time at which the service was last read."""
    retry_after_s: float = 0.0

    @property
    def stopped(self) -> bool:
        """True if the rest of the plan must not be executed."""
        return self.plan_again or self.wait

    @property
    def meets_conflict(self) -> bool:
        """True if a name was found taken in this plan."""
        return self.plan_again and any(
            failure.problem is WriteProblem.CONFLICT for failure in self.failures.values()
        )

    def succeeded(self, action: Action) -> None:
        """Count a write, and forget its failure."""
        self.written += 1
        self.failures.pop((kind_of(action), action.name), None)

    def refused(self, action: Action, problem: ApiError, now: float) -> None:
        """Record the error with which the API server answered a write."""
        if problem.is_stale or (problem.is_absent and not isinstance(action, Apply)):
            self.wait = True
            return
        why = problem_of(problem)
        if why is WriteProblem.UNAVAILABLE:
            self.wait = True
            self.retry_after_s = problem.retry_after_s or 0.0
            return
        self.fail(action, why, problem.message, now)

    def fail(self, action: Action, problem: WriteProblem, message: str, now: float) -> None:
        """Record a failed write for the next plan; log it if its problem is new."""
        kind = kind_of(action)
        before = self.failures.get((kind, action.name))
        failure = WriteFailure(
            kind=kind,
            name=action.name,
            problem=problem,
            message=message,
            since=now,
            tried=now,
            digest=action.digest if isinstance(action, Apply) else "",
        )
        if before is not None and before.problem is problem:
            failure = replace(failure, since=before.since)
        else:
            log.warning(
                "write refused",
                service=str(self.key),
                kind=kind,
                child=action.name,
                problem=problem.value,
                message=message,
            )
        self.failures[kind, action.name] = failure
        self.plan_again = True


def kind_of(action: Action) -> str:
    """Return the kind of the object that an action writes."""
    if isinstance(action, Apply):
        return action.kind.value
    return action.kind if isinstance(action, Delete) else POD.kind
