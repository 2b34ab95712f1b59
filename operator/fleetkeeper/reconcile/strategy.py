"""The order of a rollout: whether a new replica is added first, or an old one removed first.

Surge ──the additional pod finds no accelerator for 120 s──► Replace, if another replica is ready
                                                        └──► Swap, if gateways can hold the requests meanwhile
                                                        └──► Surge: the only replica stays
"""

from __future__ import annotations

import math
from typing import Final

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.types import AccessMode, InferenceServiceSpec, Rollout, RolloutStrategy
from fleetkeeper.api.values.int_or_percent import is_zero
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.types import Pod
from fleetkeeper_contract.sleep import start_p90_s

REPLACE_AFTER_S: Final = 120.0
"""An additional pod that found no accelerator in this time needs an old pod to be removed first."""

CAPACITY_REASONS = frozenset({Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE})
"""Problems of a new pod that the removal of an old pod may solve."""


def decide_strategy(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, replicas: int
) -> tuple[RolloutStrategy, float | None]:
    """Return Surge, Replace or Swap, and the seconds until time alone could change the decision.

    `replicas` is the number that is written. With more than one, Swap is Replace: the others serve.
    Auto starts with Surge. It changes to Replace or Swap for the rest of the rollout once an additional
    pod found no accelerator for 120 s. Replace and Swap in the spec are ignored while a surge adds pods
    of a revision that cannot start: no ready pod is removed for it.
    """
    chosen, again = spec.rollout.strategy, None
    if chosen is RolloutStrategy.AUTO:
        chosen, again = _decide_auto(inputs, spec, replicas)
    elif chosen is not RolloutStrategy.SURGE and _is_surge_failing(inputs, spec.rollout):
        chosen = RolloutStrategy.SURGE
    is_replace = chosen is RolloutStrategy.SWAP and replicas > 1
    return RolloutStrategy.REPLACE if is_replace else chosen, again


def _decide_auto(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, replicas: int
) -> tuple[RolloutStrategy, float | None]:
    facts, rules = inputs.facts, spec.rollout
    if _is_swapping(inputs):
        return RolloutStrategy.SWAP, None  # also on the way back
    if not is_rolling(facts):
        return RolloutStrategy.SURGE, None
    is_replacing = facts.engine is not None and facts.engine.max_surge == 0
    if is_replacing and not is_zero(rules.max_surge) and replicas > 1:
        return RolloutStrategy.REPLACE, None
    waits = [inputs.now - pod.created for pod in _without_accelerator(inputs)]
    if waits and replicas > 1 and facts.ready_replicas > 1:
        chosen = RolloutStrategy.REPLACE
    elif waits and replicas == 1 and _may_swap(inputs, spec):
        chosen = RolloutStrategy.SWAP
    else:
        return RolloutStrategy.SURGE, None
    left = REPLACE_AFTER_S - max(waits)
    return (RolloutStrategy.SURGE, left) if left > 0 else (chosen, None)


def can_hold(inputs: ReconcileInputs, spec: InferenceServiceSpec) -> bool:
    """Return True if gateways hold the requests of a service without a ready replica."""
    has_gateway = bool(inputs.context.grant_keys) and inputs.snapshot.wake.can_wake
    return has_gateway and spec.access is AccessMode.GATEWAY


def decide_lack(inputs: ReconcileInputs, spec: InferenceServiceSpec) -> Problem | None:
    """Return why the only replica is not replaced: a surge finds no accelerator. None if it is, or needs not be."""
    facts, strategy = inputs.facts, spec.rollout.strategy
    is_only = facts.live_replicas == 1 and facts.ready_replicas > 0
    if (
        not is_only
        or not is_rolling(facts)
        or any(pod.ready for pod in facts.pods_of(facts.current))
    ):
        return None
    if strategy not in {RolloutStrategy.AUTO, RolloutStrategy.SURGE} or _is_swapping(inputs):
        return None
    if strategy is RolloutStrategy.AUTO and _may_swap(inputs, spec):
        return None
    if not _without_accelerator(inputs):
        return None
    what = "The new replica finds no free accelerator, and the only one stays"
    advice = "Free one, or set rollout.strategy to Swap (access: Gateway; requests wait) or Replace (requests fail)."
    return Problem(Reason.INSUFFICIENT_GPU, say(what, "", advice))


def _may_swap(inputs: ReconcileInputs, spec: InferenceServiceSpec) -> bool:
    """Return True if gateways can hold requests for two starts: of the new revision, and of the way back.

    The starts are those that ended a sleep or a swap, and those of the present pods. A present pod
    counts from its node on: before, it may have waited for the accelerators that a swap frees.
    """
    starts = list(parse_sleep(inputs.status).start_seconds)
    starts += [
        max(1, math.ceil(pod.ready_since - (pod.scheduled_since or pod.created)))
        for pod in inputs.facts.engine_pods
        if pod.ready and pod.ready_since is not None
    ]
    p90_s = start_p90_s(starts)
    return can_hold(inputs, spec) and p90_s is not None and 2 * p90_s <= inputs.context.hold_s


def _without_accelerator(inputs: ReconcileInputs) -> list[Pod]:
    """Return the pods of the current revision that cannot be placed for lack of accelerators."""
    problems = dict(inputs.diagnosis.by_pod)
    return [
        pod
        for pod in inputs.facts.pods_of(inputs.facts.current)
        if pod.name in problems and problems[pod.name].reason is Reason.INSUFFICIENT_GPU
    ]


def _is_swapping(inputs: ReconcileInputs) -> bool:
    return parse_sleep(inputs.status).is_swapping


def _is_surge_failing(inputs: ReconcileInputs, rules: Rollout) -> bool:
    """Return True if the live Deployment surges and new pods fail, but not for lack of room."""
    facts, problems = inputs.facts, dict(inputs.diagnosis.by_pod)
    if facts.engine is None or facts.engine.max_surge == 0 or is_zero(rules.max_surge):
        return False
    pods = facts.pods_of(facts.current)
    found = [problems[pod.name].reason for pod in pods if pod.name in problems]
    return (
        is_rolling(facts)
        and not any(pod.ready for pod in pods)
        and any(reason not in CAPACITY_REASONS for reason in found)
    )


def is_rolling(facts: Facts) -> bool:
    """Return True if an older revision has pods or is still scaled above zero."""
    current = facts.current
    return current is not None and any(
        item.desired_replicas > 0 or item.replicas > 0
        for item in facts.revisions
        if item.uid != current.uid
    )
