"""When a service goes to sleep, and when it wakes.

The decision follows from the status, the pods, the wake marks and what the control loop read from the pods.
Anything unknown keeps a service awake, and leaves one that sleeps asleep. `common/sleep.py` shows the states.

A step is written to the status one reconcile before it changes replicas: gateways hold requests before the
pods are removed, and a crash between the two loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ANNOTATION_WAKE
from fleetkeeper.api.types import AccessMode, InferenceServiceSpec, RoutingPolicy, ScalingMode
from fleetkeeper.common.budget import bounded_replicas
from fleetkeeper.common.sleep import Sleep, parse_sleep
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.observe.facts import Facts, lacks_room
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.rollout import decide_failure
from fleetkeeper.reconcile.strategy import CAPACITY_REASONS, REPLACE_AFTER_S
from fleetkeeper_contract.sleep import KEPT_STARTS, SleepState, WakeMark
from fleetkeeper_contract.tiers import Tier

SETTLED_S: Final = 6.0
"""The time in which gateways see that a service goes to sleep. Only pods read later show that no request came.
One second is lost by the status's whole seconds, and up to two by a read that is dated at its end."""
ASK_AGAIN_S: Final = 1.0
"""The requeue interval while a new read of the pods is due, which causes no event."""
BACKOFF_S: Final = (0.0, 60.0, 120.0, 300.0, 600.0)
"""The time from a failed start to the next wake, by the number of failures in a row."""

OPEN_ACCESS: Final = "stays awake: spec.access is not Gateway, and requests that bypass the gateway would wake nothing"
NO_AUTO: Final = (
    "stays awake: spec.scaling.mode is not Auto, so Fleetkeeper does not set the number of replicas"
)
EARLY: Final = "The service went to sleep early"
NO_GATEWAY: Final = "stays awake: the operator has no keys of a gateway, which would hold requests"


@dataclass(frozen=True, slots=True)
class SleepDecision:
    """The sleep to write to the status, and the seconds until time alone could change it."""

    sleep: Sleep
    again_after_s: float | None = None


def decide_sleep(
    inputs: ReconcileInputs,
    spec: InferenceServiceSpec,
    gpus_per_replica: int,
    *,
    was_good: bool,
) -> SleepDecision:
    """Decide the next state of a service's sleep.

    `gpus_per_replica` is the request of the wanted template. `was_good` is true if a template has run well.
    """
    before = parse_sleep(inputs.status)
    if spec.paused or spec.suspend or spec.replicas == 0 or before.is_swapping:
        return SleepDecision(before)  # `reconcile.swap` decides the end of a swap
    why_awake = _why_never(inputs, spec)
    if why_awake is not None or spec.replicas is not None:
        return SleepDecision(_awake(before, inputs.now, message=why_awake or ""))
    if before.state is None:
        is_new = not was_good and before.number == 0
        lack = _lack_of_room(inputs, spec, gpus_per_replica) if is_new else None
        return _while_awake(inputs, spec, replace(before, message=""), lack)
    if before.state is SleepState.GOING_TO_SLEEP:
        return _while_going(inputs, before)
    if before.state is SleepState.ASLEEP:
        return _while_asleep(inputs, before)
    return _while_waking(inputs, spec, before)


def _why_never(inputs: ReconcileInputs, spec: InferenceServiceSpec) -> str | None:
    """Return why the service never sleeps, None if it may; empty if its spec does not ask for sleep."""
    if spec.scaling.sleep is None:
        return ""
    if spec.scaling.mode is not ScalingMode.AUTO:
        return NO_AUTO
    if spec.access is not AccessMode.GATEWAY:
        return OPEN_ACCESS
    return None if inputs.context.grant_keys else NO_GATEWAY


def _lack_of_room(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, gpus_per_replica: int
) -> Problem | None:
    """Return why no replica of a new service finds a place, with the time since when; None if one may start."""
    facts, diagnosis = inputs.facts, inputs.diagnosis
    if facts.current is None or inputs.is_new_generation:
        return None
    if not facts.live_replicas:
        least, allowance = spec.scaling.min_replicas, inputs.snapshot.gpu_allowance
        fits, limited_by = bounded_replicas(least, 0, gpus_per_replica, allowance)
        if fits or not limited_by:
            return None
        what = f"{limited_by} allows no replica"
        return Problem(Reason.GPU_BUDGET, say(what), facts.current.created)
    refused = diagnosis.creation_problem
    if not facts.engine_pods and refused and refused.reason is Reason.QUOTA_EXCEEDED:
        return refused
    found = dict(diagnosis.by_pod)
    waiting = [
        found[pod.name] for pod in facts.engine_pods if pod.name in found and lacks_room(pod)
    ]
    is_all = len(waiting) == len(facts.engine_pods)
    is_room = all(problem.reason in CAPACITY_REASONS for problem in waiting)
    return waiting[0] if waiting and is_all and is_room else None


def _without_room(before: Sleep, problem: Problem, now: float) -> SleepDecision:
    """Let a new service sleep that found no room for a while: its pods would get the next accelerators.

    A service with requests gets those instead. A node that an autoscaler adds later serves the next wake.
    """
    left_s = (problem.since or now) + REPLACE_AFTER_S - now
    if left_s > 0:
        return SleepDecision(before, left_s)
    advice = "The next request, or fleetkeeper wake, starts it if there is room."
    message = say("The service never started", f"{problem.reason}: {problem.message}", advice)
    asleep = _next(before, SleepState.ASLEEP, now, number=before.number + 1)
    return SleepDecision(replace(asleep, message=message, never_started=True))


def _while_awake(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, before: Sleep, lack: Problem | None
) -> SleepDecision:
    settings, snapshot = spec.scaling.sleep, inputs.snapshot
    if settings is None or not snapshot.wake.can_wake:
        return SleepDecision(before)
    if lack is not None:
        return _without_room(before, lack, inputs.now)
    if not snapshot.idle.is_idle or not _is_settled(inputs):
        return SleepDecision(before)
    if snapshot.idle.read_at < before.since + SETTLED_S:
        # A request that a gateway held has not reached the pods that were read before.
        return SleepDecision(before, max(ASK_AGAIN_S, before.since + SETTLED_S - inputs.now))
    ready_since = min(pod.ready_since or inputs.now for pod in inputs.facts.engine_pods)
    left_s = max(ready_since, before.since) + settings.min_awake_seconds - inputs.now
    sleeps_for = snapshot.idle.sleeps_for
    if left_s > 0 and not sleeps_for:
        return SleepDecision(before, left_s)
    going = _next(before, SleepState.GOING_TO_SLEEP, inputs.now, number=before.number + 1)
    why = _why_early(inputs, sleeps_for) if sleeps_for else ""
    return SleepDecision(replace(going, message=why), ASK_AGAIN_S)


def _why_early(inputs: ReconcileInputs, sleeps_for: str) -> str:
    """Return the text for the owners of the service, who need not know the services of other namespaces."""
    namespace, _, name = sleeps_for.partition("/")
    metadata = inputs.snapshot.resource.get("metadata") or {}
    is_own = namespace == metadata.get("namespace")
    who = f"service {name}" if is_own else "a service of another namespace"
    return say(EARLY, f"{who} needed its accelerators to wake")


def _while_going(inputs: ReconcileInputs, before: Sleep) -> SleepDecision:
    snapshot = inputs.snapshot
    is_certain = snapshot.idle.is_idle and snapshot.wake.can_wake and _is_settled(inputs)
    if not is_certain or _mark_of(inputs, before) is not None:
        return SleepDecision(_awake(before, inputs.now))
    if snapshot.idle.read_at < before.since + SETTLED_S:
        return SleepDecision(before, ASK_AGAIN_S)
    return SleepDecision(_next(before, SleepState.ASLEEP, inputs.now))


def _while_asleep(inputs: ReconcileInputs, before: Sleep) -> SleepDecision:
    if inputs.is_new_generation and before.failures:
        # A changed spec may start. Its first wake does not wait for the failures of another one.
        before = replace(before, failures=0, message="")
    mark = _mark_of(inputs, before)
    if mark is None:
        return SleepDecision(before)
    backoff_s = BACKOFF_S[min(before.failures, len(BACKOFF_S) - 1)]
    left_s = before.since + backoff_s - inputs.now
    if left_s > 0 and not _is_woken_by_hand(inputs, before):
        return SleepDecision(before, left_s)
    return SleepDecision(replace(_next(before, SleepState.WAKING, inputs.now), tier=mark.tier))


def _while_waking(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, before: Sleep
) -> SleepDecision:
    facts = inputs.facts
    if facts.are_available(has_router=spec.routing.policy is not RoutingPolicy.NONE):
        return SleepDecision(_awake(_with_start(facts, before, inputs.now), inputs.now))
    failure, again = decide_failure(
        facts.engine_pods,
        inputs.diagnosis.current_problems,
        float(spec.rollout.startup_seconds),
        inputs.now,
    )
    if failure is None:
        return SleepDecision(before, again)
    # The next mark must be a new one: requests that still wait write it.
    failed = _next(before, SleepState.ASLEEP, inputs.now, number=before.number + 1)
    message = f"The last start failed: {failure.reason}: {failure.message}"
    return SleepDecision(replace(failed, failures=before.failures + 1, message=message))


def _is_settled(inputs: ReconcileInputs) -> bool:
    """Return True if every wanted pod is ready and of the revision to run, and nothing else is to change."""
    facts = inputs.facts
    pods = facts.pods_of(facts.current)
    return (
        not inputs.is_new_generation
        and bool(pods)
        and len(pods) == len(facts.engine_pods) == facts.live_replicas
        and all(pod.ready for pod in pods)
    )


def _with_start(facts: Facts, before: Sleep, now: float) -> Sleep:
    """Return the sleep with the duration of the start that just ended, if one began after the mark.

    A start counts from its first pod: how long a wake waits for room says nothing about the next one.
    """
    created = [pod.created for pod in facts.engine_pods if pod.created >= before.since]
    if not created:
        return before
    starts = (*before.start_seconds, max(1, round(now - min(created))))
    return replace(before, start_seconds=starts[-KEPT_STARTS:])


def _mark_of(inputs: ReconcileInputs, before: Sleep) -> WakeMark | None:
    """Return the mark that ends this sleep, None if there is none."""
    mark = inputs.snapshot.wake.mark
    if mark is not None and mark.number == before.number:
        return mark
    is_by_hand = _is_woken_by_hand(inputs, before)
    return WakeMark(before.number, Tier.STANDARD) if is_by_hand else None


def _is_woken_by_hand(inputs: ReconcileInputs, before: Sleep) -> bool:
    metadata = inputs.snapshot.resource.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    return bool(annotations.get(ANNOTATION_WAKE) == str(before.number))


def _next(before: Sleep, state: SleepState, now: float, number: int | None = None) -> Sleep:
    return replace(
        before,
        state=state,
        since=float(int(now)),  # the status has whole seconds
        number=before.number if number is None else number,
        tier=None,
    )


def _awake(before: Sleep, now: float, message: str = "") -> Sleep:
    """Return the sleep of a service that is awake. The number stays: a mark of it must not count again."""
    since = before.since if before.state is None else float(int(now))
    return Sleep(before.number, since=since, message=message, start_seconds=before.start_seconds)
