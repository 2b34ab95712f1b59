"""The rollout of a changed pod template, and its rollback after a failure.

A Deployment alone neither rolls back nor stops: a bad revision occupies GPUs as long as it is the
desired one. Each reconcile therefore decides from three inputs that survive a restart of the
operator: the pods of the current revision, `status.lastGood`, and `status.rollback`.

    forward ──failure, last good template exists, onFailure Rollback──► back (status.rollback)
    back ──the spec asks for another template──► forward

A *failure* is a classified reason that
outlasted its patience, or no ready pod within startupSeconds. A service that never was good has no
template to return to: it stays as it is and shows its reason.

The rollback is written to the status one reconcile before it is carried out, so a crash between the
two loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.types import OnFailure, Rollout, RolloutStrategy
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.last_good import LastGood
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.types import Pod

PLACEMENT_S = 600.0
"""The time in which the successor of an only replica must find an accelerator. A cluster autoscaler adds a
node within minutes, and nothing else is known to come: startupSeconds is for loading a model."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of a problem, after which the rollout counts as failed.

    `terminations` is the number of a container's terminations, `seconds` the age of the pod. None
    means that this limit never applies (startupSeconds still does).
    """

    terminations: int | None = None
    seconds: float | None = None


PATIENCE: Mapping[Reason, Patience] = {
    # The same input fails in the same way again.
    Reason.BAD_ENGINE_OPTION: Patience(terminations=1),
    Reason.UNSUPPORTED_ARCHITECTURE: Patience(terminations=1),
    # A network file system or a model hub may be unavailable for a moment.
    Reason.MODEL_NOT_FOUND: Patience(terminations=2),
    Reason.MODEL_NOT_READABLE: Patience(terminations=2),
    # Another process on the accelerator or a slow node may cause one or two of these.
    Reason.CUDA_OUT_OF_MEMORY: Patience(terminations=3),
    Reason.HOST_OUT_OF_MEMORY: Patience(terminations=3),
    Reason.ENGINE_HUNG: Patience(terminations=3),
    Reason.CRASH_LOOP: Patience(terminations=3, seconds=None),
    # The kubelet retries by itself; registries and volumes usually recover within minutes.
    Reason.IMAGE_PULL: Patience(seconds=180.0),
    Reason.MISSING_SECRET: Patience(seconds=60.0),
    Reason.MISSING_SERVICE_ACCOUNT: Patience(seconds=60.0),
    Reason.MISSING_VOLUME: Patience(seconds=180.0),
    Reason.IMAGE_VOLUMES_UNSUPPORTED: Patience(seconds=60.0),
    Reason.ADMISSION_DENIED: Patience(seconds=60.0),
    # The cluster may gain capacity: only startupSeconds ends the wait.
    Reason.UNSCHEDULABLE: Patience(),
    Reason.INSUFFICIENT_GPU: Patience(),
    Reason.QUOTA_EXCEEDED: Patience(),
    Reason.ROLLOUT_FAILED: Patience(terminations=0),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The failed state of a problem, and the seconds until time alone could change it."""

    failed: bool
    again_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """A failed template, which is not tried again until the spec asks for another one."""

    generation: int
    template_hash: str
    reason: Reason
    message: str

    def to_status(self) -> dict[str, Any]:
        """Return the content of `status.rollback`."""
        return {
            "generation": self.generation,
            "templateHash": self.template_hash,
            "reason": str(self.reason),
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """The template that the engine Deployment is to have.

    If `rollback` is set, that is the last good one, `revision` names the ReplicaSet with this
    template, and `is_new` is true until the status contains the rollback. `failure` is the reason
    why the wanted template cannot run, even if a rollback is impossible. `again_after_s` is the
    number of seconds until time alone could change the decision.
    """

    rollback: Rollback | None = None
    revision: str | None = None
    is_new: bool = False
    failure: Problem | None = None
    again_after_s: float | None = None


def parse_rollback(status: Mapping[str, Any]) -> Rollback | None:
    """Parse `status.rollback`, None if it is absent or unreadable."""
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


def decide_verdict(problem: Problem, now: float) -> Verdict:
    """Decide whether a problem has outlasted its patience.

    Worked example: an image that cannot be pulled is a failure 180 s after the creation of its pod.
    At 170 s the result is "not failed, requeue after 10 s".
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
    """Return the failure of a revision from its pods and problems, and the seconds until a requeue.

    `startup_s` applies only while no pod is ready. A revision with a ready pod may still fail
    because of a problem of another pod.
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
    """Return the failure of a start that took too long: the first problem, else RolloutFailed."""
    if problems:
        return problems[0]
    what = f"No engine became ready within {startup_s:g} s"
    advice = "Read the pods' logs, or raise spec.rollout.startupSeconds."
    return Problem(Reason.ROLLOUT_FAILED, say(what, "", advice))


def decide_rollout(
    inputs: ReconcileInputs,
    rules: Rollout,
    wanted_hash: str,
    last_good: LastGood | None,
    lack: Problem | None = None,
) -> RolloutDecision:
    """Decide between the wanted template and the last good one.

    `lack` is the reason why an only replica is not replaced. Then the rollout fails after `PLACEMENT_S`.
    """
    facts, known = inputs.facts, parse_rollback(inputs.status)
    good_revision = _last_good_revision(facts, last_good, wanted_hash)
    is_refused = rules.on_failure is OnFailure.ROLLBACK and not _has_room_now(facts, rules, known)
    if known and known.template_hash == wanted_hash and is_refused:
        return RolloutDecision(known, good_revision) if good_revision else RolloutDecision()
    current = facts.current
    if current is None or current.template_hash != wanted_hash:
        return RolloutDecision()
    if last_good and last_good.template_hash == wanted_hash:
        return RolloutDecision()
    startup_s = float(rules.startup_seconds)
    failure, again = decide_failure(
        facts.pods_of(current),
        inputs.diagnosis.current_problems,
        startup_s if lack is None else min(startup_s, PLACEMENT_S),
        inputs.now,
    )
    if failure is None:
        return RolloutDecision(again_after_s=again)
    if lack is not None and failure.reason is lack.reason:
        failure = lack
    if good_revision is None or rules.on_failure is OnFailure.HOLD:
        return RolloutDecision(failure=failure)
    rollback = Rollback(inputs.generation, wanted_hash, failure.reason, failure.message)
    return RolloutDecision(rollback, good_revision, is_new=True, failure=failure)


def _has_room_now(facts: Facts, rules: Rollout, known: Rollback | None) -> bool:
    """Return True if a surge found no accelerator, and the spec now asks to remove the old pod first.

    Then the failed template is tried again. The live Deployment still surges until it is written.
    """
    makes_room = rules.strategy in {RolloutStrategy.REPLACE, RolloutStrategy.SWAP}
    surged = facts.engine is not None and facts.engine.max_surge != 0
    lacked = known is not None and known.reason is Reason.INSUFFICIENT_GPU
    return makes_room and surged and lacked


def _last_good_revision(facts: Facts, last_good: LastGood | None, wanted_hash: str) -> str | None:
    """Return the ReplicaSet of the last good template, None if it is missing or the wanted one."""
    if last_good is None or last_good.template_hash == wanted_hash:
        return None
    revision = facts.revision_with(last_good.template_hash)
    return revision.name if revision else None


def is_scale_up_blocked(facts: Facts, problems: Sequence[Problem]) -> bool:
    """Return True if no pod of the current revision is ready and the reason is known."""
    pods = facts.pods_of(facts.current)
    return bool(problems) and bool(pods) and not any(pod.ready for pod in pods)
