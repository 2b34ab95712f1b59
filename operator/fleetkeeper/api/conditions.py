"""Condition types and reasons: closed sets whose members carry their explanation.

Add reasons here and nowhere else. Each reason that requires action has a page in docs/runbooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

MESSAGE_MAX_LENGTH = 256


def fit_message(message: str) -> str:
    """Return a message that fits into a condition. Its middle is cut, because its end says what to do."""
    if len(message) <= MESSAGE_MAX_LENGTH:
        return message
    half = (MESSAGE_MAX_LENGTH - len("...")) // 2
    return f"{message[:half].rstrip()}...{message[-half:].lstrip()}"


class DocumentedEnum(StrEnum):
    """An enum whose members carry their explanation in `.text`."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        """Create a member with its text."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class ConditionType(DocumentedEnum):
    """The type of a condition. `.text` says what True means."""

    AVAILABLE = (
        "Available",
        "The service accepts requests: at least one replica is ready and, with a router, at least one router pod.",
    )
    READY = (
        "Ready",
        "The service accepts requests, the current generation is rolled out, and enough replicas are ready.",
    )
    PROGRESSING = "Progressing", "A rollout, start, or scale operation is in progress."
    RECONCILING = (
        "Reconciling",
        "A generation is not rolled out yet. Present only when True. Autoscaling does not set it.",
    )
    STALLED = (
        "Stalled",
        "The service makes no progress until the spec or the cluster changes. Present only when True.",
    )
    DEGRADED = "Degraded", "The service accepts requests, but does not operate as specified."
    METRICS_AVAILABLE = "MetricsAvailable", "Enough replicas report fresh metrics."
    METRICS_COMPATIBLE = (
        "MetricsCompatible",
        "The engine version exports every metric that Fleetkeeper needs.",
    )
    MEMORY_WITHIN_CAP = (
        "MemoryWithinCap",
        "The measured memory peak of every replica is within memory.capPercent.",
    )
    SCALING_LIMITED = (
        "ScalingLimited",
        "A bound, spec.replicas, spec.suspend, scaling.mode, the GPU budget, or a failing revision limits scaling.",
    )


ONLY_WHEN_TRUE = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""Conditions that are absent instead of False."""


class Status(StrEnum):
    """The status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(DocumentedEnum):
    """The reason for a condition's status. `.text` explains it; the message adds names and figures."""

    # Before the first evaluation
    PENDING = "Pending", "Fleetkeeper has not evaluated this condition yet."

    # Available, Ready
    ANSWERING = "Answering", "At least one replica accepts requests."
    ALL_READY = "AllReplicasReady", "All desired replicas are ready."
    ENOUGH_READY = "EnoughReplicasReady", "Enough replicas are ready."
    NO_READY_REPLICA = "NoReadyReplica", "No replica is ready."
    NO_READY_ROUTER = "NoReadyRouter", "No router pod is ready."
    MINIMUM_REPLICAS_UNAVAILABLE = (
        "MinimumReplicasUnavailable",
        "Fewer replicas are ready than the service requires.",
    )
    NOT_ROLLED_OUT = "NotRolledOut", "The current generation is not rolled out yet."
    STARTING = "Starting", "Replicas are starting and loading the model."

    # Progressing, Reconciling
    ROLLED_OUT = "RolledOut", "All replicas run the current generation."
    ROLLING_OUT = "RollingOut", "Replicas of the current generation are replacing older ones."
    PREFETCHING_MODEL = (
        "PrefetchingModel",
        "A Job downloads the new model. Replicas are replaced once it has ended.",
    )
    SCALING_UP = "ScalingUp", "Replicas are being added."
    SCALING_DOWN = "ScalingDown", "Replicas are being drained and removed."

    # Stalled, Degraded
    ROLLED_BACK = "RolledBack", "The rollout failed. The last good revision handles requests."
    ROLLOUT_HELD = (
        "RolloutHeld",
        "The rollout failed and was stopped because rollout.onFailure is Hold.",
    )
    ROLLOUT_FAILED = (
        "RolloutFailed",
        "No replica of the new revision became ready within rollout.startupSeconds.",
    )
    PREFETCH_FAILED = (
        "PrefetchFailed",
        "The Job that downloads the new model failed. The old replicas keep serving.",
    )
    REPLICAS_CONTESTED = (
        "ReplicasContested",
        "Another field manager keeps changing spec.replicas of the engine Deployment.",
    )
    CONTROL_BREAKER_OPEN = (
        "ControlBreakerOpen",
        "Metrics or actuators cannot be trusted. Known safe limits are in force.",
    )
    LOAD_BREAKER_OPEN = "LoadBreakerOpen", "Requests of some tiers are shed because of overload."
    REMEDY_IN_FORCE = (
        "RemedyInForce",
        "Smaller limits are in force because an engine ran out of memory.",
    )
    PODS_EJECTED = (
        "PodsEjected",
        "Some running replicas receive no requests because they are not ready.",
    )
    SOME_REPLICAS_FAILING = (
        "SomeReplicasFailing",
        "The service accepts requests, but some replicas cannot start or keep failing.",
    )
    NO_GRANT_KEYS = (
        "NoGrantKeys",
        "spec.access is Gateway, but the operator has no keys of a gateway. Engines refuse every request.",
    )
    GRANTS_NOT_DEMANDED = (
        "GrantsNotDemanded",
        "spec.access is Gateway, but an engine accepts requests that the gateway did not sign.",
    )
    INTERNAL_ERROR = (
        "InternalError",
        "A step for this service failed because of a defect in Fleetkeeper. All other steps continue.",
    )
    AS_EXPECTED = "AsExpected", "The service operates as specified."
    WRITE_FAILED = "WriteFailed", "The API server did not accept a write. Fleetkeeper retries it."

    # Not ready: the causes
    IMAGE_PULL = "ImagePull", "An image cannot be pulled."
    UNSCHEDULABLE = "Unschedulable", "No node fits the pods."
    INSUFFICIENT_GPU = "InsufficientGPU", "No node has enough free accelerators."
    MODEL_NOT_FOUND = "ModelNotFound", "The model does not exist at model.source."
    MODEL_NOT_READABLE = "ModelNotReadable", "The model exists, but the engine cannot read it."
    BAD_ENGINE_OPTION = "BadEngineOption", "The engine rejected an option."
    UNSUPPORTED_ARCHITECTURE = (
        "UnsupportedArchitecture",
        "The engine does not support this model, or does not support it on this hardware.",
    )
    CUDA_OUT_OF_MEMORY = "CUDAOutOfMemory", "The engine ran out of accelerator memory."
    HOST_OUT_OF_MEMORY = "HostOutOfMemory", "The engine ran out of pod memory."
    ENGINE_HUNG = "EngineHung", "The engine has requests but makes no progress."
    CRASH_LOOP = "CrashLoop", "The engine container fails repeatedly."
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        "The namespace's quota does not allow the pods or the child objects.",
    )
    ADMISSION_DENIED = (
        "AdmissionDenied",
        "An admission policy of the cluster denied a pod or a child object.",
    )
    NAME_CONFLICT = (
        "NameConflict",
        "An object that Fleetkeeper does not own has the name of a child object.",
    )
    MISSING_SECRET = "MissingSecret", "A Secret that the pods mount does not exist."
    MISSING_SERVICE_ACCOUNT = (
        "MissingServiceAccount",
        "The ServiceAccount of the pods does not exist.",
    )
    MISSING_VOLUME = "MissingVolume", "A PersistentVolumeClaim does not exist or is not bound."
    IMAGE_VOLUMES_UNSUPPORTED = (
        "ImageVolumesUnsupported",
        "The cluster cannot mount images as volumes, which oci:// models require.",
    )
    UNKNOWN_PROFILE = "UnknownProfile", "The operator does not have this engine profile."
    CRD_TOO_OLD = "CRDTooOld", "The CRD in the cluster is older than the operator requires."
    INVALID_SPEC = "InvalidSpec", "The spec has an invalid value or combination of values."
    UNREADABLE_OBJECT = (
        "UnreadableObject",
        "Fleetkeeper cannot read an object of the service, so it creates, deletes, and scales nothing.",
    )
    NAMESPACE_TERMINATING = "NamespaceTerminating", "The namespace is being deleted."
    STOPPED = "Stopped", "spec.replicas is 0."
    SUSPENDED = "Suspended", "spec.suspend is true: the service has no replicas."
    PAUSED = "Paused", "spec.paused is true: Fleetkeeper does not change child objects."
    ASLEEP = (
        "Asleep",
        "The service has no replicas because no request came. The next one wakes it.",
    )
    NEVER_STARTED = (
        "NeverStarted",
        "The service has never started, because there was no room for it. The next request starts it.",
    )
    WAKE_FAILED = (
        "WakeFailed",
        "The last start from sleep failed. Its accelerators are free again, and the next wake waits.",
    )
    WAKING = "Waking", "The first replica starts. The gateway holds requests until it is ready."

    SWAPPING = (
        "Swapping",
        "The only replica is replaced. The gateway holds requests until the new one is ready.",
    )
    SWAP_WAITS = (
        "SwapWaits",
        "The only replica is not replaced, because no gateway can hold its requests meanwhile.",
    )

    # MetricsAvailable, MetricsCompatible
    FRESH_METRICS = "FreshMetrics", "Metrics are fresh."
    NO_METRICS = "NoMetrics", "No metrics are available. The number of replicas stays unchanged."
    STALE_METRICS = "StaleMetrics", "Metrics are too old. The number of replicas stays unchanged."
    TOO_FEW_REPORT = (
        "TooFewReplicasReporting",
        "Too few replicas report metrics. The number of replicas stays unchanged.",
    )
    ALL_METRICS_PRESENT = (
        "AllMetricsPresent",
        "The engine exports every metric that Fleetkeeper needs.",
    )
    METRICS_MISSING = "MetricsMissing", "The engine lacks metrics that Fleetkeeper needs."

    # MemoryWithinCap
    WITHIN_CAP = "WithinCap", "Every measured memory peak is within the cap."
    ABOVE_CAP = "AboveCap", "A replica used more memory than the cap allows."
    NOT_MEASURED = "NotMeasured", "No replica has reported its memory use yet."

    # ScalingLimited
    WITHIN_BOUNDS = "WithinBounds", "The recommended number of replicas is within all bounds."
    AT_MAXIMUM = "AtMaximum", "The load requires more replicas than scaling.maxReplicas."
    AT_MINIMUM = "AtMinimum", "The service runs scaling.minReplicas replicas."
    REPLICAS_PINNED = "ReplicasPinned", "spec.replicas is set, so Fleetkeeper does not scale."
    GPU_BUDGET = "GPUBudget", "The GPU budget does not allow more replicas."
    ADVISORY = (
        "Advisory",
        "scaling.mode is Advisory: Fleetkeeper reports its recommendation, but does not apply it.",
    )
    EXTERNAL = "External", "scaling.mode is External: spec.replicas sets the number of replicas."
    SCALE_UP_BLOCKED = (
        "ScaleUpBlocked",
        "No replica of the newest revision is ready, so Fleetkeeper adds none.",
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
        Reason.MISSING_SERVICE_ACCOUNT,
        Reason.MISSING_VOLUME,
        Reason.IMAGE_VOLUMES_UNSUPPORTED,
        Reason.UNKNOWN_PROFILE,
        Reason.CRD_TOO_OLD,
        Reason.STOPPED,
        Reason.SUSPENDED,
        Reason.PAUSED,
    }
)
"""The causes of a service that is not ready. A test reaches each of them."""


def previous_condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any] | None:
    """Return the condition of this type in a status, None if it is absent."""
    for condition in status.get("conditions") or ():
        if isinstance(condition, Mapping) and condition.get("type") == kind:
            return condition
    return None
