"""The enums of the spec."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """The data type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """The quantization methods of weights, with vLLM's names."""

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


class WakeForBatch(StrEnum):
    """When lines of a batch wake a service that sleeps."""

    DEADLINE = "Deadline"
    ALWAYS = "Always"


class ScalingMode(StrEnum):
    """The ways to set the number of replicas."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    EXTERNAL = "External"


class BatchingMode(StrEnum):
    """The ways to set the batch limits."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    FIXED = "Fixed"


class BreakerMode(StrEnum):
    """The modes of the circuit breakers."""

    AUTO = "Auto"
    DISABLED = "Disabled"


class RoutingPolicy(StrEnum):
    """The load-balancing policies of the router."""

    LEAST_LOADED = "LeastLoaded"
    SESSION_AFFINITY = "SessionAffinity"
    PREFIX_AWARE = "PrefixAware"
    ROUND_ROBIN = "RoundRobin"
    NONE = "None"


class NetworkPreset(StrEnum):
    """The sets of clients that may connect to the service."""

    SAME_NAMESPACE = "SameNamespace"
    CLUSTER = "Cluster"
    NAMESPACES = "Namespaces"
    GATEWAY = "Gateway"


class AccessMode(StrEnum):
    """The ways in which requests reach the engines."""

    OPEN = "Open"
    GATEWAY = "Gateway"


class ServiceType(StrEnum):
    """The types of the Kubernetes Service that clients call."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RolloutStrategy(StrEnum):
    """The order in which a rollout creates and removes pods."""

    AUTO = "Auto"
    SURGE = "Surge"
    REPLACE = "Replace"
    SWAP = "Swap"


class OnFailure(StrEnum):
    """The reactions to a failed rollout."""

    ROLLBACK = "Rollback"
    HOLD = "Hold"


class EngineUpdates(StrEnum):
    """The times at which a service adopts a newer profile behind its alias."""

    ON_SPEC_CHANGE = "OnSpecChange"
    AUTOMATIC = "Automatic"
