"""The number of replicas of the engine Deployment, and which pods a scale-down removes.

The service's activation sets it (common/activation.py), otherwise the control loop's allocation,
otherwise the live value. The GPU budget limits every increase.
The value is always applied, because a field that server-side apply omits returns to its default of 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.names import FIELD_MANAGER
from fleetkeeper.api.types import InferenceServiceSpec, ScalingMode
from fleetkeeper.common.activation import State, activation_of, parse_suspended
from fleetkeeper.common.budget import accelerators_of, bounded_replicas, exceeds
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.common.values import Manifest, ReplicaAllocation
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.plan import MarkPod
from fleetkeeper.reconcile.rollout import is_scale_up_blocked

CONTEST_WINDOW_S = 600.0
CONTEST_CHANGES = 3
"""With more changes by another manager within the window, Fleetkeeper stops reverting them."""


class Source(StrEnum):
    """The source of the number of replicas."""

    SPEC = "Spec"
    ALLOCATION = "Allocation"
    UNCHANGED = "Unchanged"
    CONTESTED = "Contested"


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """The number of replicas with its reason.

    `wanted` is the number before a blocked scale-up, a contest or the GPU budget changed it.
    `contested_by` is the field manager that keeps changing the number, `limited_by` the budget that
    allows no more.
    """

    value: int
    wanted: int
    source: Source
    reason: Reason
    message: str
    contested_by: str = ""
    is_scale_up_blocked: bool = False
    limited_by: str = ""

    @property
    def limit_in_words(self) -> str:
        """Return which budget allows how many of the wanted replicas."""
        return f"{self.limited_by} allows {self.value} of {self.wanted} replicas"


def decide_replicas(
    inputs: ReconcileInputs, spec: InferenceServiceSpec, gpus_per_replica: int
) -> ReplicaDecision:
    """Decide the number of replicas of the engine Deployment.

    While the newest revision cannot start, more replicas would only occupy more accelerators.
    `gpus_per_replica` is the request of the template that is written.
    """
    facts, snapshot = inputs.facts, inputs.snapshot
    contested_by = _contesting_manager(inputs)
    live = facts.live_replicas
    value, source, reason, message = _asked(inputs, spec)
    if contested_by and live is not None and live != value:
        return ReplicaDecision(
            live, value, Source.CONTESTED, Reason.REPLICAS_CONTESTED, message, contested_by
        )
    is_blocked = is_scale_up_blocked(facts, inputs.diagnosis.current_problems)
    if is_blocked and live is not None and value > live:
        return ReplicaDecision(
            live, value, source, Reason.SCALE_UP_BLOCKED, message, is_scale_up_blocked=True
        )
    fits, limited_by = bounded_replicas(value, live or 0, gpus_per_replica, snapshot.gpu_allowance)
    if limited_by:
        decision = ReplicaDecision(
            fits, value, source, Reason.GPU_BUDGET, message, limited_by=limited_by
        )
        return replace(decision, message=f"{message}; {decision.limit_in_words}")
    return ReplicaDecision(value, value, source, reason, message)


def _asked(inputs: ReconcileInputs, spec: InferenceServiceSpec) -> tuple[int, Source, Reason, str]:
    """Return the requested number of replicas, its source, its reason and the message."""
    live = inputs.facts.live_replicas
    if spec.suspend and spec.paused and live:
        return live, Source.UNCHANGED, Reason.PAUSED, "unchanged, because spec.paused is true"
    if spec.suspend:
        return 0, Source.SPEC, Reason.SUSPENDED, "spec.suspend is true"
    activation = activation_of(
        spec,
        None if live else parse_suspended(inputs.status),
        is_asleep=parse_sleep(inputs.status).is_asleep,
    )
    if activation.is_asleep:
        return 0, Source.SPEC, Reason.ASLEEP, "the service is asleep"
    if activation.replicas is None:
        return _scaled(spec, live, inputs.snapshot.allocation)
    if activation.state is State.RESUMING:
        message = "spec.suspend is false again"
        return activation.replicas, Source.SPEC, Reason.WITHIN_BOUNDS, message
    return _pinned(activation.replicas, spec.scaling.mode)


def _scaled(
    spec: InferenceServiceSpec, live: int | None, allocation: ReplicaAllocation | None
) -> tuple[int, Source, Reason, str]:
    """Return the number that neither spec.replicas nor spec.suspend sets."""
    scaling = spec.scaling
    if scaling.mode is ScalingMode.AUTO and allocation is not None:
        value = min(max(allocation.replicas, scaling.min_replicas), scaling.max_replicas)
        return value, Source.ALLOCATION, Reason.WITHIN_BOUNDS, allocation.message
    if live is None or live == 0:
        return (
            scaling.min_replicas,
            Source.UNCHANGED,
            Reason.AT_MINIMUM,
            "start at scaling.minReplicas",
        )
    if scaling.mode is not ScalingMode.AUTO:
        return (
            live,
            Source.UNCHANGED,
            Reason.ADVISORY,
            "unchanged, because scaling.mode is not Auto",
        )
    value = min(max(live, scaling.min_replicas), scaling.max_replicas)
    if value != live:
        bound = "scaling.minReplicas" if value > live else "scaling.maxReplicas"
        return value, Source.SPEC, Reason.WITHIN_BOUNDS, f"{bound} is {value}"
    return value, Source.UNCHANGED, Reason.WITHIN_BOUNDS, "unchanged"


def _pinned(replicas: int, mode: ScalingMode) -> tuple[int, Source, Reason, str]:
    message = f"spec.replicas is {replicas}"
    if replicas == 0:
        return 0, Source.SPEC, Reason.STOPPED, message
    reason = Reason.EXTERNAL if mode is ScalingMode.EXTERNAL else Reason.REPLICAS_PINNED
    return replicas, Source.SPEC, reason, message


def _contesting_manager(inputs: ReconcileInputs) -> str:
    """Return the field manager that contests the number of replicas, "" if there is none.

    More than 3 changes by others in 10 minutes start a contest. It lasts while the other manager
    owns the field, until the spec changes. Otherwise it would start again after 10 minutes.
    """
    writes, facts = inputs.snapshot.foreign_replica_writes, inputs.facts
    recent = [who for when, who in writes if inputs.now - when <= CONTEST_WINDOW_S]
    if len(recent) > CONTEST_CHANGES:
        return Counter(recent).most_common(1)[0][0]
    if inputs.is_new_generation or facts.engine is None:
        return ""
    owner = facts.engine.replicas_manager
    if owner and owner != FIELD_MANAGER and _is_reported(inputs.status):
        return owner
    return ""


def _is_reported(status: Mapping[str, Any]) -> bool:
    """Return True if the status reports a contest."""
    return any(
        condition.get("type") == ConditionType.DEGRADED
        and condition.get("reason") == Reason.REPLICAS_CONTESTED
        for condition in status.get("conditions") or ()
        if isinstance(condition, Mapping)
    )


def gpus_of(template: Manifest | None, inputs: ReconcileInputs) -> int:
    """Return the GPUs that a pod of the template requests, else those of the live template."""
    if template is not None:
        return accelerators_of(template["spec"])
    engine = inputs.facts.engine
    return engine.accelerators if engine else 0


def over_budget(inputs: ReconcileInputs, replicas: ReplicaDecision, gpus: int) -> Problem | None:
    """Return GPUBudget if the new template needs more GPUs than the budget allows, else None.

    Then the Deployment is not written.
    """
    engine, allowance = inputs.facts.engine, inputs.snapshot.gpu_allowance
    held = engine.desired_replicas * engine.accelerators if engine else 0
    if not exceeds(replicas.value * gpus, held, allowance):
        return None
    what = f"{replicas.value} replicas with {gpus} GPUs each exceed {allowance.by}"
    advice = (
        "The engines keep running unchanged. "
        "Request fewer GPUs or replicas, or raise the GPU budget."
    )
    return Problem(Reason.GPU_BUDGET, say(what, "", advice))


def decide_marks(facts: Facts, value: int, load: Mapping[str, float]) -> tuple[MarkPod, ...]:
    """Return the pods to mark before the engine Deployment is scaled down to `value` replicas.

    Those with the least load go first. Kubernetes removes pods that are not ready first, then those with
    the lowest deletion cost. A mark (the deletion cost that Fleetkeeper sets) is never removed. The next
    mark is lower, which makes an old mark harmless on a pod whose load has grown since.

    `load` is the number of running and waiting sequences by pod name. A pod without a figure is
    never chosen. Nothing is marked if only unready pods are to be removed, or if Kubernetes would
    already choose the same pods.

    Worked example: with loads {a: 3, b: 0, c: 7}, a scale-down from 3 to 2 marks b with -1; one
    from 3 to 1 marks b with -2 and a with -1.
    """
    pods = facts.engine_pods
    ready = [pod for pod in pods if pod.ready]
    going = min(len(ready), max(0, len(pods) - value) - (len(pods) - len(ready)))
    known = [pod for pod in ready if pod.name in load]
    chosen = sorted(known, key=lambda pod: (load[pod.name], -pod.created, pod.name))
    if going <= 0 or going == len(ready) or len(chosen) < going:
        return ()
    chosen = chosen[:going]
    others = [pod.deletion_cost for pod in ready if pod not in chosen]
    if max(pod.deletion_cost for pod in chosen) < min(others):
        return ()
    lowest = min(0, *(pod.deletion_cost for pod in ready))
    return tuple(
        MarkPod(pod.name, pod.uid, lowest - going + place) for place, pod in enumerate(chosen)
    )
