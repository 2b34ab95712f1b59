"""Condition types and reasons: closed sets, each with its text.

Every reason has a page in docs/runbooks. A reason is added here and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

MESSAGE_MAX_LENGTH = 256


class Told(StrEnum):
    """An enum whose members carry their own explanation in `.text`."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        """A member with its text."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class ConditionType(Told):
    """What is told about a service. `.text` says what True means."""

    AVAILABLE = (
        "Available",
        "At least one engine and, with a router, one router pod is ready: it answers.",
    )
    READY = (
        "Ready",
        "It answers, the current generation was rolled out and enough replicas are ready.",
    )
    PROGRESSING = "Progressing", "Something moves: a roll-out, a start, a change of replicas."
    RECONCILING = (
        "Reconciling",
        "A generation is not rolled out yet. Present only when True; never for autoscaling.",
    )
    STALLED = (
        "Stalled",
        "Nothing will change without a change of the spec or the cluster. Present only when True.",
    )
    DEGRADED = "Degraded", "It serves, but not as asked."
    METRICS_AVAILABLE = "MetricsAvailable", "Fresh signals come from enough replicas."
    METRICS_COMPATIBLE = (
        "MetricsCompatible",
        "Every metric that decisions need exists on this engine version.",
    )
    MEMORY_WITHIN_CAP = (
        "MemoryWithinCap",
        "The measured peak of every replica is within memory.capPercent.",
    )
    SCALING_LIMITED = (
        "ScalingLimited",
        "More or fewer replicas are wanted than the bounds, a pin or the GPU budget allow.",
    )


ONLY_WHEN_TRUE = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""Conditions that are left out rather than shown as False."""


class Status(StrEnum):
    """A condition's status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(Told):
    """Why a condition is as it is. `.text` explains it; a message adds names and numbers."""

    # At the first visit
    PENDING = "Pending", "Not looked at yet."

    # Available, Ready
    ANSWERING = "Answering", "At least one replica answers."
    ALL_READY = "AllReplicasReady", "As many replicas are ready as were ordered."
    ENOUGH_READY = "EnoughReplicasReady", "Enough replicas are ready."
    NO_READY_REPLICA = "NoReadyReplica", "No engine is ready."
    NO_READY_ROUTER = "NoReadyRouter", "No router pod is ready."
    MINIMUM_REPLICAS_UNAVAILABLE = (
        "MinimumReplicasUnavailable",
        "Fewer replicas are ready than the service must have.",
    )
    NOT_ROLLED_OUT = "NotRolledOut", "The current generation is not rolled out yet."
    STARTING = "Starting", "Engines load their model."

    # Progressing, Reconciling
    ROLLED_OUT = "RolledOut", "The current generation runs on all replicas."
    ROLLING_OUT = "RollingOut", "Replicas are being replaced by the current generation."
    SCALING_UP = "ScalingUp", "Replicas are being added."
    SCALING_DOWN = "ScalingDown", "Replicas are being drained and removed."
    WRITING = "WritingChildren", "Children are being written."

    # Stalled, Degraded
    ROLLED_BACK = "RolledBack", "The roll-out failed; the last good revision serves."
    ROLLOUT_HELD = "RolloutHeld", "The roll-out failed and was stopped, as rollout.onFailure says."
    ROLLOUT_FAILED = (
        "RolloutFailed",
        "No engine of the new revision became ready within rollout.startupSeconds.",
    )
    REPLICAS_CONTESTED = (
        "ReplicasContested",
        "Another manager keeps changing the replicas of the engine Deployment.",
    )
    CONTROL_BREAKER_OPEN = (
        "ControlBreakerOpen",
        "Signals or actuators cannot be trusted; known safe values are in force.",
    )
    LOAD_BREAKER_OPEN = "LoadBreakerOpen", "Requests of some tiers are refused for overload."
    REMEDY_IN_FORCE = (
        "RemedyInForce",
        "Smaller limits are in force after an engine ran out of memory.",
    )
    PODS_EJECTED = "PodsEjected", "Some replicas are kept out of service."
    SOME_REPLICAS_FAILING = (
        "SomeReplicasFailing",
        "It serves, while some replicas cannot start or keep failing.",
    )
    INTERNAL_ERROR = (
        "InternalError",
        "A step for this service failed by a defect of Fleetkeeper; everything else of it holds.",
    )
    AS_EXPECTED = "AsExpected", "It serves as asked."
    WRITE_FAILED = "WriteFailed", "The API server did not take a write; it is tried again."

    # Not ready, told apart
    IMAGE_PULL = "ImagePull", "An image cannot be pulled."
    UNSCHEDULABLE = "Unschedulable", "No node fits the pods."
    INSUFFICIENT_GPU = "InsufficientGPU", "No node has enough free accelerators."
    MODEL_NOT_FOUND = "ModelNotFound", "The model is not where model.source says."
    MODEL_NOT_READABLE = "ModelNotReadable", "The model is there, and the engine may not read it."
    BAD_ENGINE_OPTION = "BadEngineOption", "The engine refused an option."
    UNSUPPORTED_ARCHITECTURE = (
        "UnsupportedArchitecture",
        "The engine cannot run this model or not on this hardware.",
    )
    CUDA_OUT_OF_MEMORY = "CUDAOutOfMemory", "The engine ran out of accelerator memory."
    HOST_OUT_OF_MEMORY = "HostOutOfMemory", "The engine ran out of memory of its pod."
    ENGINE_HUNG = "EngineHung", "The engine had work and made no step."
    CRASH_LOOP = "CrashLoop", "The engine keeps ending."
    QUOTA_EXCEEDED = "QuotaExceeded", "The namespace's quota has no room for the pods or children."
    ADMISSION_DENIED = "AdmissionDenied", "A policy of the cluster refused a pod or a child."
    NAME_CONFLICT = "NameConflict", "A child's name is taken by an object that is not ours."
    MISSING_SECRET = "MissingSecret", "A Secret that the pods mount does not exist."
    MISSING_VOLUME = "MissingVolume", "A PersistentVolumeClaim does not exist or is not bound."
    UNKNOWN_PROFILE = "UnknownProfile", "The operator has no such engine profile."
    CRD_TOO_OLD = "CRDTooOld", "The CRD in the cluster is older than the operator needs."
    INVALID_SPEC = "InvalidSpec", "The spec asks for something that cannot be."
    UNREADABLE_OBJECT = (
        "UnreadableObject",
        "An object of the service cannot be read, so nothing is created, deleted or scaled.",
    )
    NAMESPACE_TERMINATING = "NamespaceTerminating", "The namespace is being deleted."
    STOPPED = "Stopped", "spec.replicas is 0."
    PAUSED = "Paused", "spec.paused is true: nothing is written."

    # MetricsAvailable, MetricsCompatible
    FRESH_METRICS = "FreshMetrics", "Signals are fresh."
    NO_METRICS = "NoMetrics", "No signals come; replicas are held."
    STALE_METRICS = "StaleMetrics", "Signals are too old; replicas are held."
    TOO_FEW_REPORT = (
        "TooFewReplicasReporting",
        "Signals come from too few replicas; replicas are held.",
    )
    ALL_METRICS_PRESENT = "AllMetricsPresent", "Every metric that decisions need is there."
    METRICS_MISSING = "MetricsMissing", "Metrics that decisions need do not exist on this engine."

    # MemoryWithinCap
    WITHIN_CAP = "WithinCap", "Every measured peak is within the cap."
    ABOVE_CAP = "AboveCap", "A replica used more memory than the cap allows."
    NOT_MEASURED = "NotMeasured", "No replica has reported its memory yet."

    # ScalingLimited
    WITHIN_BOUNDS = "WithinBounds", "As many replicas are ordered as are wanted."
    AT_MAXIMUM = "AtMaximum", "More replicas are wanted than scaling.maxReplicas."
    AT_MINIMUM = "AtMinimum", "Fewer replicas would do than scaling.minReplicas."
    REPLICAS_PINNED = "ReplicasPinned", "spec.replicas is set, so Fleetkeeper does not scale."
    GPU_BUDGET = "GPUBudget", "The fleet's GPU budget allows no more."
    ADVISORY = "Advisory", "scaling.mode is Advisory: the wish is reported, not ordered."
    EXTERNAL = "External", "scaling.mode is External: spec.replicas is the order."
    SCALE_UP_BLOCKED = (
        "ScaleUpBlocked",
        "The newest revision has no ready replica, so none are added.",
    )


NOT_READY_REASONS = frozenset(
    {
        Reason.IMAGE_PULL,
        Reason.UNSCHEDULABLE,
        Reason.INSUFFICIENT_GPU,
        Reason.MODEL_NOT_FOUND,
        Reason.MODEL_NOT_READABLE,
        Reason.BAD_ENGINE_OPTION,
        Reason.UNSUPPORTED_ARCHITECTURE,
        Reason.CUDA_OUT_OF_MEMORY,
        Reason.HOST_OUT_OF_MEMORY,
        Reason.ENGINE_HUNG,
        Reason.CRASH_LOOP,
        Reason.QUOTA_EXCEEDED,
        Reason.ADMISSION_DENIED,
        Reason.NAME_CONFLICT,
        Reason.MISSING_SECRET,
        Reason.MISSING_VOLUME,
        Reason.UNKNOWN_PROFILE,
        Reason.CRD_TOO_OLD,
        Reason.STOPPED,
        Reason.PAUSED,
    }
)
"""The reasons for not ready that are told apart, each reached by a test of its own."""
