"""The conditions that follow from measurements: metrics, memory, and what limits scaling.

`ControlReport` states which of them the control loop decides and which are decided here from its facts.
Until a new operator process has measured a service, the conditions in the status stay.
"""

from __future__ import annotations

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import ScalingMode
from fleetkeeper.common.values import ScalingReport
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.value import Value, false, gpu_limit_message, kept, parsed, true

_SHARED = " The driver does not list the processes of a replica, so everything on its devices counts, including other pods."
_PINNED = "Autoscaling is off: spec.replicas is set. To remove it:"
"""Followed by a command, which with the longest names leaves 61 characters for this text."""


def metrics_available(assessment: Assessment) -> Value:
    """Return MetricsAvailable as the control loop decided it."""
    return _from_control(assessment, ConditionType.METRICS_AVAILABLE)


def metrics_compatible(assessment: Assessment) -> Value:
    """Return MetricsCompatible as the control loop decided it."""
    return _from_control(assessment, ConditionType.METRICS_COMPATIBLE)


def _from_control(assessment: Assessment, kind: ConditionType) -> Value:
    for condition in assessment.control.conditions if assessment.control else ():
        if condition.type is kind:
            return Value(condition.status, condition.reason, condition.message)
    return kept(assessment, kind, Reason.PENDING)


def memory_within_cap(assessment: Assessment) -> Value:
    """Decide MemoryWithinCap: the measured peaks are within the cap."""
    memory = assessment.control.memory if assessment.control else None
    if memory is None or memory.over_cap_pod is None:
        return kept(assessment, ConditionType.MEMORY_WITHIN_CAP, Reason.NOT_MEASURED)
    if memory.over_cap_pod:
        text = f"Replica {memory.over_cap_pod} had a memory peak above the cap of {memory.cap_percent}%. The highest peak of all replicas is {memory.peak_percent}%."
        return false(Reason.ABOVE_CAP, text if memory.own else text + _SHARED)
    if not memory.peak_percent:
        return Value(Status.UNKNOWN, Reason.NOT_MEASURED, Reason.NOT_MEASURED.text)
    return true(Reason.WITHIN_CAP, "" if memory.own else Reason.WITHIN_CAP.text + _SHARED)


def scaling_limited(assessment: Assessment) -> Value:
    """Decide ScalingLimited: bounds, a pin or the GPU budget prevent the wanted replicas."""
    service, replicas = assessment.service, assessment.replicas
    if service is None or replicas is None:
        return kept(assessment, ConditionType.SCALING_LIMITED, Reason.PENDING)
    if replicas.limited_by:
        return true(Reason.GPU_BUDGET, gpu_limit_message(replicas))
    set_by_user = _set_by_user(assessment, service)
    if set_by_user is not None:
        return set_by_user
    if replicas.is_scale_up_blocked:
        return true(Reason.SCALE_UP_BLOCKED)
    return _limited_by_load(assessment, service.spec.scaling.mode)


def _set_by_user(assessment: Assessment, service: InferenceService) -> Value | None:
    """Return the field with which a user sets the number of replicas, None if there is none."""
    if assessment.is_suspended:
        return true(Reason.SUSPENDED)
    if assessment.is_asleep:
        return false(assessment.rest_reason)
    if service.spec.scaling.mode is ScalingMode.EXTERNAL:
        return false(Reason.EXTERNAL)
    if service.spec.replicas is not None:
        undo = """'[{"op":"remove","path":"/spec/replicas"}]'"""
        command = f"kubectl patch fis {service.name} -n {service.namespace} --type json -p {undo}"
        return true(Reason.REPLICAS_PINNED, f"{_PINNED} {command}")
    return None


def _limited_by_load(assessment: Assessment, mode: ScalingMode) -> Value:
    """Return ScalingLimited by the control loop's facts, the previous one until it reports any."""
    if assessment.control is not None and assessment.control.scaling is not None:
        return limited_by_load(assessment.control.scaling)
    before = previous_condition(assessment.previous, ConditionType.SCALING_LIMITED)
    is_pending = assessment.control_pending and not assessment.is_new_generation
    first = Reason.ADVISORY if mode is ScalingMode.ADVISORY else Reason.WITHIN_BOUNDS
    return (parsed(before) if is_pending else None) or false(first)


def limited_by_load(scaling: ScalingReport) -> Value:
    """Return what keeps the recommended replicas from running, according to the control loop."""
    if scaling.wanted is not None:
        text = f"{scaling.wanted} replicas are recommended but not applied: spec.scaling.mode is Advisory."
        return true(Reason.ADVISORY, text)
    if scaling.budget:
        budget = scaling.budget[:1].upper() + scaling.budget[1:]
        text = f"{budget} allows {scaling.desired} of {scaling.recommended} recommended replicas."
        return true(Reason.GPU_BUDGET, text)
    if scaling.blocked:
        return true(Reason.SCALE_UP_BLOCKED, scaling.blocked)
    if scaling.exceeded_max is not None:
        text = f"The load is too high for spec.scaling.maxReplicas ({scaling.exceeded_max}). Raise it to allow more replicas."
        return true(Reason.AT_MAXIMUM, text)
    return false(Reason.WITHIN_BOUNDS)
