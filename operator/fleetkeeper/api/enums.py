"""The closed sets of words in the spec."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """The type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """How weights are quantized, in vLLM's words."""

    AWQ = "awq"
    AWQ_MARLIN = "awq_marlin"
    COMPRESSED_TENSORS = "compressed-tensors"
    EXPERTS_INT8 = "experts_int8"
    FP8 = "fp8"
    FP8_PER_BLOCK = "fp8_per_block"
    FP8_PER_TENSOR = "fp8_per_tensor"
    GPTQ = "gptq"
    GPTQ_MARLIN = "gptq_marlin"
    MODELOPT = "modelopt"
    MODELOPT_FP4 = "modelopt_fp4"
    MOE_WNA16 = "moe_wna16"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"


class ScalingMode(StrEnum):
    """Who decides the number of replicas."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    EXTERNAL = "External"


class BatchingMode(StrEnum):
    """Who decides the batch limits."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    FIXED = "Fixed"


class BreakerMode(StrEnum):
    """Whether the circuit breakers act."""

    AUTO = "Auto"
    DISABLED = "Disabled"


class RoutingPolicy(StrEnum):
    """How the router chooses a replica."""

    LEAST_LOADED = "LeastLoaded"
    SESSION_AFFINITY = "SessionAffinity"
    ROUND_ROBIN = "RoundRobin"
    NONE = "None"


class AccessFrom(StrEnum):
    """Who may reach the address."""

    SAME_NAMESPACE = "SameNamespace"
    CLUSTER = "Cluster"
    NAMESPACES = "Namespaces"


class RolloutStrategy(StrEnum):
    """Whether a new pod comes before an old one goes."""

    AUTO = "Auto"
    SURGE = "Surge"
    REPLACE = "Replace"


class OnFailure(StrEnum):
    """What follows a failed roll-out."""

    ROLLBACK = "Rollback"
    HOLD = "Hold"


class EngineUpdates(StrEnum):
    """When a newer profile behind an alias is taken."""

    ON_SPEC_CHANGE = "OnSpecChange"
    AUTOMATIC = "Automatic"
