"""How a change of the pod template goes on, and when it goes back.

A Deployment alone neither returns nor stops: it holds new GPUs for a bad revision as long as that is
the wanted one. Here every look decides afresh from three things that outlive a restart: the pods of
the current revision, `status.lastGood`, and `status.rollback`.

    forward ──failure, a last good template is there, onFailure Rollback──► rolled back (status.rollback)
    rolled back ──the spec asks for another template──► forward

*Last good*: the template of the current revision, once no other revision is wanted any more and one
of its pods was ready for a minute. The first one is written with the next status that is written
anyway, and at the latest before the Deployment gets another template. *Failure*: a classified reason that outlasted its patience, or no
ready pod within startupSeconds. A service that never was good has nothing to go back to: it stays
and shows its reason.

The rollback is written to the status one look before it is carried out, so a crash between the two
forgets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status
from fleetkeeper.api.types import OnFailure, Rollout, RolloutStrategy
from fleetkeeper.plan.facts import Facts
from fleetkeeper.plan.model import Pod, Revision
from fleetkeeper.plan.moment import moment_of_text
from fleetkeeper.plan.previous import previous_condition
from fleetkeeper.plan.reasons import Problem, say

GOOD_AFTER_S = 60.0
"""A pod that was ready for so long makes its template a good one."""
REPLACE_AFTER_S = 120.0
"""An extra pod that found no accelerator for so long finds none: an old one has to go first."""

WANT_OF_ROOM = frozenset({Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE})
"""Problems of a new pod that an old one's end may solve."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a problem may last before the roll-out counts as failed.

    `terminations` counts a container's ends, `seconds` the pod's age; None means that it alone
    never decides (startupSeconds does).
    """

    terminations: int | None = None
    seconds: float | None = None


PATIENCE: Mapping[Reason, Patience] = {
    # The same input ends the same way.
    Reason.BAD_ENGINE_OPTION: Patience(terminations=1),
    Reason.UNSUPPORTED_ARCHITECTURE: Patience(terminations=1),
    # A network file system or a hub may blink once.
    Reason.MODEL_NOT_FOUND: Patience(terminations=2),
    Reason.MODEL_NOT_READABLE: Patience(terminations=2),
    # A neighbour on the accelerator or a slow node may explain one or two.
    Reason.CUDA_OUT_OF_MEMORY: Patience(terminations=3),
    Reason.HOST_OUT_OF_MEMORY: Patience(terminations=3),
    Reason.ENGINE_HUNG: Patience(terminations=3),
    Reason.CRASH_LOOP: Patience(terminations=3, seconds=None),
    # The kubelet tries again by itself; registries and volumes come back within minutes.
    Reason.IMAGE_PULL: Patience(seconds=180.0),
    Reason.MISSING_SECRET: Patience(seconds=60.0),
    Reason.MISSING_VOLUME: Patience(seconds=180.0),
    Reason.ADMISSION_DENIED: Patience(seconds=60.0),
    # The cluster may grow: only startupSeconds ends the wait.
    Reason.UNSCHEDULABLE: Patience(),
    Reason.INSUFFICIENT_GPU: Patience(),
    Reason.QUOTA_EXCEEDED: Patience(),
    Reason.ROLLOUT_FAILED: Patience(terminations=0),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a problem has become a failure, and when that could change by time alone."""

    failed: bool
    again_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class LastGood:
    """The template that served last, and the generation that asked for it."""

    generation: int
    template_hash: str

    def to_status(self) -> dict[str, Any]:
        """As `status.lastGood` holds it."""
        return {"generation": self.generation, "templateHash": self.template_hash}


@dataclass(frozen=True, slots=True)
class Rollback:
    """A template that failed and is not tried again until the spec asks for another."""

    generation: int
    template_hash: str
    reason: Reason
    message: str

    def to_status(self) -> dict[str, Any]:
        """As `status.rollback` holds it."""
        return {
            "generation": self.generation,
            "templateHash": self.template_hash,
            "reason": str(self.reason),
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """Which template the engine Deployment shall have.

    `rollback` is set when it is the last good one, and then `revision` names the ReplicaSet that
    holds it; `is_new` says that the status does not tell of it yet. `failure` is the reason why the
    wanted template cannot run, whether or not there is a way back. `again_after_s` is when time
    alone could change the answer.
    """

    rollback: Rollback | None = None
    revision: str | None = None
    is_new: bool = False
    failure: Problem | None = None
    again_after_s: float | None = None


def parse_last_good(status: Mapping[str, Any]) -> LastGood | None:
    """`status.lastGood`, None when it is absent or unreadable."""
    part = status.get("lastGood")
    if not isinstance(part, Mapping) or not part.get("templateHash"):
        return None
    return LastGood(int(part.get("generation") or 0), str(part["templateHash"]))


def parse_rollback(status: Mapping[str, Any]) -> Rollback | None:
    """`status.rollback`, None when it is absent or unreadable."""
    part = status.get("rollback")
    if not isinstance(part, Mapping) or not part.get("templateHash"):
        return None
    known = {str(reason): reason for reason in Reason}
    return Rollback(
        int(part.get("generation") or 0),
        str(part["templateHash"]),
        known.get(str(part.get("reason")), Reason.ROLLOUT_FAILED),
        str(part.get("message") or ""),
    )


def decide_last_good(
    facts: Facts, status: Mapping[str, Any], wanted_hash: str, generation: int, now: float
) -> tuple[LastGood | None, float | None]:
    """The last good template, and after how many seconds the current one could become it.

    The first template of a service needs no look of its own a minute after its start: whether it was
    good is seen at any later look, by its pods or by a status that has said Ready for a minute.
    """
    known, current = parse_last_good(status), facts.current
    if current is None or not current.template_hash:
        return known, None
    if known and known.template_hash == current.template_hash:
        return known, None
    if any(item.desired_replicas > 0 for item in facts.revisions if item.uid != current.uid):
        return known, None
    lasted = _ready_for_s(facts, current, status, now)
    if lasted is None:
        return known, None
    if lasted < GOOD_AFTER_S:
        return known, GOOD_AFTER_S - lasted if known else None
    is_wanted = current.template_hash == wanted_hash
    before = known.generation if known else int(status.get("observedGeneration") or generation)
    return LastGood(generation if is_wanted else before, current.template_hash), None


def _ready_for_s(
    facts: Facts, current: Revision, status: Mapping[str, Any], now: float
) -> float | None:
    """For how long the current revision has had, or had until this look, a ready pod.

    The status counts for the only revision there is, and when it was made before the service was
    Ready: else it could speak of another.
    """
    since = [
        pod.ready_since
        for pod in facts.pods_of(current)
        if pod.ready and pod.ready_since is not None
    ]
    ready = previous_condition(status, ConditionType.READY) or {}
    told = moment_of_text(str(ready.get("lastTransitionTime")))
    is_told = ready.get("status") == Status.TRUE and len(facts.revisions) == 1
    if is_told and told is not None and current.created <= told:
        since.append(told)
    return now - min(since) if since else None


def decide_verdict(problem: Problem, now: float) -> Verdict:
    """Whether a problem has outlasted its patience.

    Worked example: an image that cannot be pulled is a failure 180 s after its pod was made, so at
    170 s the answer is "not yet, look again in 10 s".
    """
    patience = PATIENCE.get(problem.reason)
    if patience is None:
        return Verdict(False)
    if patience.terminations is not None and problem.terminations >= patience.terminations:
        return Verdict(True)
    if patience.seconds is not None and problem.since is not None:
        left = problem.since + patience.seconds - now
        return Verdict(True) if left <= 0 else Verdict(False, left)
    return Verdict(False)


def decide_failure(
    pods: Sequence[Pod], problems: Sequence[Problem], startup_s: float, now: float
) -> tuple[Problem | None, float | None]:
    """The failure of a revision by its pods and their problems, and when to look again.

    A revision with a ready pod older than `startup_s` may still fail by a problem of another pod;
    the limit itself counts only while none is ready.
    """
    again: list[float] = []
    for problem in problems:
        verdict = decide_verdict(problem, now)
        if verdict.failed:
            return problem, None
        if verdict.again_after_s is not None:
            again.append(verdict.again_after_s)
    if pods and not any(pod.ready for pod in pods):
        left = min(pod.created for pod in pods) + startup_s - now
        if left <= 0:
            return _timed_out(problems, startup_s), None
        again.append(left)
    return None, min(again, default=None)


def _timed_out(problems: Sequence[Problem], startup_s: float) -> Problem:
    """The failure by the clock: the reason that the pods show, or that they just take too long."""
    if problems:
        return problems[0]
    what = f"No engine became ready within {startup_s:g} s"
    advice = "Read the pods' logs, or raise spec.rollout.startupSeconds."
    return Problem(Reason.ROLLOUT_FAILED, say(what, "", advice))


def decide_rollout(
    facts: Facts,
    problems: Sequence[Problem],
    *,
    wanted_hash: str,
    last_good: LastGood | None,
    known: Rollback | None,
    rules: Rollout,
    generation: int,
    now: float,
) -> RolloutDecision:
    """Forward, or back to the last good template.

    `problems` are those of the pods of the current revision, the oldest pod's first.
    """
    way_back = _way_back(facts, last_good, wanted_hash)
    if known and known.template_hash == wanted_hash and rules.on_failure is OnFailure.ROLLBACK:
        return RolloutDecision(known, way_back) if way_back else RolloutDecision()
    current = facts.current
    if current is None or current.template_hash != wanted_hash:
        return RolloutDecision()
    if last_good and last_good.template_hash == wanted_hash:
        return RolloutDecision()
    failure, again = decide_failure(
        facts.pods_of(current), problems, float(rules.startup_seconds), now
    )
    if failure is None:
        return RolloutDecision(again_after_s=again)
    if way_back is None or rules.on_failure is OnFailure.HOLD:
        return RolloutDecision(failure=failure)
    rollback = Rollback(generation, wanted_hash, failure.reason, failure.message)
    return RolloutDecision(rollback, way_back, is_new=True, failure=failure)


def _way_back(facts: Facts, last_good: LastGood | None, wanted_hash: str) -> str | None:
    """The ReplicaSet with the last good template, when there is one that is not the wanted one."""
    if last_good is None or last_good.template_hash == wanted_hash:
        return None
    revision = facts.revision_with(last_good.template_hash)
    return revision.name if revision else None


def decide_strategy(
    facts: Facts, problems: Mapping[str, Problem], rules: Rollout, now: float
) -> tuple[RolloutStrategy, float | None]:
    """Surge or Replace, and when time alone could change the answer.

    Auto means Surge, and Replace from the moment when an extra pod found no accelerator for 120 s
    while more than one replica is ready, until the roll-out is over. Replace that is asked for while a
    revision that cannot start is being surged waits: no pod that serves is given up for it. `problems`
    are by pod name.
    """
    if rules.strategy is RolloutStrategy.REPLACE and _surges_in_vain(facts, problems, rules):
        return RolloutStrategy.SURGE, None
    if rules.strategy is not RolloutStrategy.AUTO:
        return rules.strategy, None
    if not _is_rolling(facts):
        return RolloutStrategy.SURGE, None
    if facts.engine is not None and facts.engine.max_surge == 0 and rules.max_surge > 0:
        return RolloutStrategy.REPLACE, None
    waits = [
        now - pod.created
        for pod in facts.pods_of(facts.current)
        if pod.name in problems and problems[pod.name].reason is Reason.INSUFFICIENT_GPU
    ]
    if not waits or facts.ready_replicas < 2:
        return RolloutStrategy.SURGE, None
    left = REPLACE_AFTER_S - max(waits)
    return (RolloutStrategy.SURGE, left) if left > 0 else (RolloutStrategy.REPLACE, None)


def _surges_in_vain(facts: Facts, problems: Mapping[str, Problem], rules: Rollout) -> bool:
    """Whether the live Deployment surges and its new pods fail, but not for want of room."""
    if facts.engine is None or facts.engine.max_surge == 0 or rules.max_surge == 0:
        return False
    pods = facts.pods_of(facts.current)
    found = [problems[pod.name].reason for pod in pods if pod.name in problems]
    return (
        _is_rolling(facts)
        and not any(pod.ready for pod in pods)
        and any(reason not in WANT_OF_ROOM for reason in found)
    )


def _is_rolling(facts: Facts) -> bool:
    """Whether an older revision still has, or shall have, pods."""
    current = facts.current
    return current is not None and any(
        item.desired_replicas > 0 or item.replicas > 0
        for item in facts.revisions
        if item.uid != current.uid
    )


def is_scale_up_blocked(facts: Facts, problems: Sequence[Problem]) -> bool:
    """Whether more replicas would only feed a revision of which no pod is ready, for a known reason."""
    pods = facts.pods_of(facts.current)
    return bool(problems) and bool(pods) and not any(pod.ready for pod in pods)
