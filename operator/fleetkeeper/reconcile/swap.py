"""The replacement of an only replica while gateways hold its requests.

    serving ──a write would remove the only ready pod──► Swapping ──6 s──► Deployment written ──► serving
                                                                             └──failed──► last good template ──► serving

The status says Swapping before the Deployment changes, because gateways read it. It says so until the
replica of the template to run serves, also after a rollback. Everything else follows from the live
objects, so a crash between any two writes loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.types import InferenceServiceSpec, RolloutStrategy, RoutingPolicy
from fleetkeeper.common.sleep import Sleep
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.rollout import decide_failure
from fleetkeeper.reconcile.sleep import SETTLED_S
from fleetkeeper.reconcile.strategy import can_hold
from fleetkeeper_contract.sleep import KEPT_STARTS, SleepState

NO_GATEWAY_AGAIN_S: Final = 15.0
"""The requeue interval while no gateway can hold requests. Not every end of that is an event."""


@dataclass(frozen=True, slots=True)
class SwapDecision:
    """The sleep to write to the status, and the reason for which the engine Deployment must wait.

    While `is_held_back`, the Deployment is not written. `problem` is the reason for which the swap does
    not begin, `again_after_s` the seconds until time alone could change the decision.
    """

    sleep: Sleep
    is_held_back: bool = False
    problem: Problem | None = None
    again_after_s: float | None = None


def decide_swap(
    inputs: ReconcileInputs,
    spec: InferenceServiceSpec,
    before: Sleep,
    *,
    strategy: RolloutStrategy,
    replicas: int,
    target: str,
) -> SwapDecision:
    """Decide whether a swap begins, continues or ends.

    `strategy` and `replicas` are those to write, `target` is the hash of the template to write, "" if
    none is to be written. Without a ready pod, there is nothing to hold requests for: no swap begins.
    """
    if spec.paused:
        return SwapDecision(before)
    is_swapping = before.is_swapping
    if is_swapping and _is_over(inputs, spec, strategy, replicas, target):
        return SwapDecision(_ended(inputs.facts, before, inputs.now))
    ready = [pod for pod in inputs.facts.engine_pods if pod.ready]
    is_lost = bool(ready) and not any(pod.template_hash == target for pod in ready)
    if not (is_lost and target and replicas == 1 and strategy is RolloutStrategy.SWAP):
        return SwapDecision(before)
    if not can_hold(inputs, spec):
        return SwapDecision(before, True, _no_gateway(), NO_GATEWAY_AGAIN_S)
    if not is_swapping:
        since = float(int(inputs.now))  # the status has whole seconds
        starts = before.start_seconds
        begun = Sleep(before.number + 1, SleepState.SWAPPING, since, start_seconds=starts)
        return SwapDecision(begun, True)
    left = before.since + SETTLED_S - inputs.now
    return SwapDecision(before, True, None, left) if left > 0 else SwapDecision(before)


def _is_over(
    inputs: ReconcileInputs,
    spec: InferenceServiceSpec,
    strategy: RolloutStrategy,
    replicas: int,
    target: str,
) -> bool:
    """Return True if nothing is to be held anymore: a replica serves, none is wanted, or none can start."""
    facts, current = inputs.facts, inputs.facts.current
    if replicas == 0:
        return True
    if current is None:
        return False
    pods, startup_s = facts.pods_of(current), float(spec.rollout.startup_seconds)
    problems = inputs.diagnosis.current_problems
    failure, _ = decide_failure(pods, problems, startup_s, inputs.now)
    if current.template_hash == target and failure is not None:
        return True  # with a way back, the target would be another template
    has_router = spec.routing.policy is not RoutingPolicy.NONE
    if not facts.are_available(has_router=has_router) or not any(pod.ready for pod in pods):
        return False
    if replicas > 1 or strategy is not RolloutStrategy.SWAP:
        return True  # the write to come removes no pod before another one is ready, or the spec wants that
    is_alone = len(pods) == len(facts.engine_pods) == facts.live_replicas
    return current.template_hash == target and is_alone and all(pod.ready for pod in pods)


def _ended(facts: Facts, before: Sleep, now: float) -> Sleep:
    """Return the sleep of a service that is awake, with the duration of the start if there was one.

    A start counts from the write of the Deployment. The pod may be older: it waited for room.
    """
    written = before.since + SETTLED_S
    took = [
        max(1, round(pod.ready_since - max(pod.created, written)))
        for pod in facts.pods_of(facts.current)
        if pod.ready_since is not None and pod.ready_since >= written
    ]
    starts = (*before.start_seconds, *took[:1])[-KEPT_STARTS:]
    return Sleep(before.number, since=float(int(now)), start_seconds=starts)


def _no_gateway() -> Problem:
    what = (
        "The only replica is not replaced, because no gateway has shown that it can hold requests"
    )
    advice = "Check the pods of the gateway, or set rollout.strategy to Surge or Replace."
    return Problem(Reason.SWAP_WAITS, say(what, "", advice))
