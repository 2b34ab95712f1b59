"""The spec of an InferenceService as frozen values: fields, defaults, bounds, descriptions.

The one source of the CRD and of the reference. A default here can never change once it reaches a
pod template, and never depends on another field or a profile: what depends is worked out
(`fleetkeeper.api.profile`) and shown in `status.effective`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import (
    LabelValue,
    ObjectName,
    Quantity,
    Section,
    StringMap,
    frozen_map,
)
from fleetkeeper.api.scheduling import Affinity, LabelSelector, Toleration

MODEL_SOURCE = (
    r"^(pvc://[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
    r"|hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})$"
)
ModelSource = Annotated[str, Field(min_length=7, max_length=512, pattern=MODEL_SOURCE)]
GitRevision = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
]
ServedName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")
]
EnvironmentValue = Annotated[str, Field(max_length=1024, pattern=r"^[ -~]*$")]
OPTION_VALUE_MAX_LENGTH = 253
OptionValue = Annotated[str, Field(max_length=OPTION_VALUE_MAX_LENGTH)]
AnnotationValue = Annotated[str, Field(max_length=4096)]
ProfileName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
ResourceName = Annotated[
    str,
    Field(
        min_length=3,
        max_length=240,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
]
Replicas = Annotated[int, Field(ge=0, le=1000)]


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


class SecretKey(Section):
    """A key of a Secret in the same namespace."""

    name: ObjectName = Field(description="The Secret's name, in the service's namespace.")
    key: str = Field(
        "token",
        min_length=1,
        max_length=253,
        pattern=r"^\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$",
        description="The key within the Secret.",
    )


class ModelCache(Section):
    """Where downloaded models are kept. Exactly one of the two."""

    claim_name: ObjectName | None = Field(
        None,
        description="A PersistentVolumeClaim in the service's namespace, shared by the pods; it must allow writing from several pods.",
    )
    ephemeral_size: Quantity | None = Field(
        None,
        description="The size limit of an emptyDir of each pod, for example 100Gi. Every new pod downloads again.",
    )


class Adapter(Section):
    """A LoRA adapter, loaded when the engine starts."""

    name: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="The name by which requests ask for the adapter (the field `model` of a request).",
    )
    source: ModelSource = Field(
        description="Where the adapter is: pvc://CLAIM/PATH or hf://ORG/NAME."
    )
    revision: GitRevision | None = Field(
        None, description="The commit of an hf:// adapter: 40 hexadecimal digits."
    )


class Model(Section):
    """What is served."""

    source: ModelSource = Field(
        description="Where the model is: pvc://CLAIM/PATH (a PersistentVolumeClaim in the service's namespace) or hf://ORG/NAME (Hugging Face)."
    )
    revision: GitRevision | None = Field(
        None,
        description="The commit of an hf:// model: 40 hexadecimal digits. A branch or a tag is taken only where the operator's settings allow floating revisions.",
    )
    served_name: ServedName | None = Field(
        None,
        description="The name by which requests ask for the model. Absent means the service's own name.",
    )
    token_secret: SecretKey | None = Field(
        None,
        description="The Hugging Face token, for models that need one. Mounted by name; the operator never reads it.",
    )
    cache: ModelCache | None = Field(
        None,
        description="Where an hf:// model is kept. Absent means that every new pod downloads it again.",
    )
    adapters: tuple[Adapter, ...] = Field(
        (), max_length=32, description="LoRA adapters, loaded when the engine starts. At most 32."
    )


class Engine(Section):
    """How vLLM runs."""

    profile: ProfileName = Field(
        "cuda",
        description="The engine profile: an alias (cuda, cpu) or an exact name (cuda-0.32.0-1). Profiles are the operator's settings; an alias is resolved when the service is made and when its spec changes.",
    )
    dtype: Dtype = Field(
        Dtype.AUTO, description="The type of weights and activations. auto follows the model."
    )
    quantization: Quantization | None = Field(
        None,
        description="How the weights are quantized. Absent means as the model's own configuration says.",
    )
    max_model_length: Annotated[int, Field(ge=128, le=10_000_000)] | None = Field(
        None,
        description="The longest sequence, prompt and answer together, in tokens. Absent means the model's own limit.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=16, description="The number of accelerators that share each layer of the model."
    )
    prefix_caching: bool = Field(
        True,
        description="Whether the KV cache of common beginnings of prompts is shared between requests.",
    )
    options: StringMap[OptionValue] = Field(
        default_factory=frozen_map,
        max_length=64,
        description='Further vLLM options by name without the leading dashes, as strings, for example enforce-eager: "true". Only those in the reference are taken.',
    )
    env: StringMap[EnvironmentValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Environment variables of the engine; only names that the profile allows, such as HF_ENDPOINT, HTTPS_PROXY and NCCL_DEBUG.",
    )


class Accelerator(Section):
    """The accelerators of each replica."""

    resource: ResourceName = Field(
        "nvidia.com/gpu",
        description="The extended resource to ask for. MIG profiles are resources of their own, for example nvidia.com/mig-3g.40gb.",
    )
    count: int = Field(
        1,
        ge=1,
        le=16,
        description="Accelerators of each replica; the same number as engine.tensorParallelSize.",
    )


class Resources(Section):
    """What each replica asks for. Request and limit are the same, except for CPU, which has no limit."""

    accelerator: Accelerator | None = Field(
        None,
        description="The accelerators of each replica. Absent means as the profile says: nvidia.com/gpu times engine.tensorParallelSize on cuda profiles, none on cpu profiles.",
    )
    cpu: Quantity | None = Field(
        None, description="Cores of each replica, for example 4. Absent means as the profile says."
    )
    memory: Quantity | None = Field(
        None,
        description="Memory of each replica, in bytes, for example 32Gi. Absent means as the profile says.",
    )
    shared_memory: Quantity | None = Field(
        None,
        description="The size of /dev/shm, in bytes, for example 2Gi; counts as part of memory. Absent means as the profile says.",
    )


class Memory(Section):
    """The cap on memory."""

    cap_percent: int = Field(
        80,
        ge=10,
        le=80,
        description="The share of memory that a replica may use, in percent: of the accelerator's memory on cuda profiles, of resources.memory on cpu profiles.",
    )


class Placement(Section):
    """Where the engine pods run."""

    node_selector: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels that a node must have.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), max_length=32, description="Taints that the engine pods tolerate."
    )
    affinity: Affinity = Field(
        default_factory=Affinity,
        description="Kubernetes' affinity rules, within the service's namespace.",
    )
    priority_class_name: ObjectName | None = Field(
        None,
        description="The PriorityClass of the engine pods. Absent means the cluster's default.",
    )
    runtime_class_name: ObjectName | None = Field(
        None, description="The RuntimeClass of the engine pods. Absent means the cluster's default."
    )
    scheduler_name: ObjectName | None = Field(
        None, description="The scheduler of the engine pods. Absent means the cluster's default."
    )
    topology_spread: bool = Field(
        True,
        description="Whether replicas are spread over nodes and zones where possible (never at the price of waiting).",
    )


class PodMetadata(Section):
    """Labels and annotations of the engine pods, for queues, meshes and cost tools."""

    labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels of the engine pods. Names that begin with fleetkeeper.io/ are refused.",
    )
    annotations: StringMap[AnnotationValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Annotations of the engine pods. Names that begin with fleetkeeper.io/ are refused.",
    )


class Scaling(Section):
    """How many replicas."""

    mode: ScalingMode = Field(
        ScalingMode.AUTO,
        description="Auto: Fleetkeeper decides. Advisory: it computes and reports, and does not act. External: spec.replicas is the order (a person, HPA, KEDA).",
    )
    min_replicas: int = Field(
        1, ge=1, le=1000, description="The fewest replicas that Fleetkeeper orders."
    )
    max_replicas: int = Field(
        8, ge=1, le=1000, description="The most replicas that Fleetkeeper orders."
    )
    scale_down_delay_seconds: int = Field(
        600,
        ge=30,
        le=86_400,
        description="Seconds that fewer replicas must have been enough before one goes.",
    )


class Objectives(Section):
    """What the fleet is held to."""

    queue_wait_milliseconds: int = Field(
        500,
        ge=10,
        le=600_000,
        description="The time from a request's arrival to its first scheduling, in milliseconds.",
    )
    batch_time_milliseconds: int = Field(
        50,
        ge=2,
        le=60_000,
        description="The time of one engine step, which a user feels between two tokens, in milliseconds.",
    )
    attainment_percent: int = Field(
        95,
        ge=50,
        le=99,
        description="The share of requests and of steps that must be within, in percent.",
    )


class Batching(Section):
    """The limits of a batch, and who moves them."""

    mode: BatchingMode = Field(
        BatchingMode.AUTO,
        description="Auto: Fleetkeeper moves the limits of the running engines. Advisory: it computes and reports. Fixed: the start-up values stay.",
    )
    min_sequences: int = Field(
        4, ge=1, le=8192, description="The fewest sequences that a batch is limited to."
    )
    max_sequences: int = Field(
        256,
        ge=1,
        le=8192,
        description="The most sequences in a batch; also the engine's start-up value. A change restarts the engines.",
    )
    min_tokens: int = Field(
        256, ge=64, le=1_048_576, description="The fewest tokens that a step is limited to."
    )
    max_tokens: int = Field(
        8192,
        ge=64,
        le=1_048_576,
        description="The most tokens in a step; also the engine's start-up value. A change restarts the engines.",
    )


class Tier(Section):
    """A class of requests."""

    queue_limit: int = Field(
        256,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )


class RealtimeTier(Tier):
    """Requests of the tier realtime."""

    queue_limit: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )


class BatchTier(Tier):
    """Requests of the tier batch."""

    queue_limit: int = Field(
        1024,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )
    share_percent: int = Field(
        30,
        ge=1,
        le=100,
        description="The most of the sequences that batch requests take while others wait, in percent.",
    )
    floor_percent: int = Field(
        5,
        ge=0,
        le=100,
        description="The share of the sequences that batch requests always keep, in percent.",
    )


class Tiers(Section):
    """The classes of requests, chosen by the request header X-Inference-Tier; without it standard."""

    realtime: RealtimeTier = Field(
        default_factory=RealtimeTier, description="Requests that somebody waits for."
    )
    standard: Tier = Field(default_factory=Tier, description="Requests without a tier.")
    batch: BatchTier = Field(
        default_factory=BatchTier, description="Requests that may wait for long."
    )


class Breaker(Section):
    """The circuit breakers."""

    mode: BreakerMode = Field(
        BreakerMode.AUTO,
        description="Auto: they act. Disabled: they report only.",
    )
    fallback_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="The fewest replicas while the control breaker is open. Absent means those that run.",
    )


class Routing(Section):
    """The router in front of the engines."""

    policy: RoutingPolicy = Field(
        RoutingPolicy.LEAST_LOADED,
        description="LeastLoaded: the less loaded of two replicas. SessionAffinity: by the header X-Session-ID. RoundRobin: in turn. None: no router, a plain Service.",
    )
    replicas: int = Field(1, ge=1, le=16, description="Router pods. Not used with policy None.")


class Access(Section):
    """Who may reach the address."""

    from_: AccessFrom = Field(
        AccessFrom.CLUSTER,
        alias="from",
        description="SameNamespace: pods of the service's namespace. Cluster: every pod. Namespaces: those that namespaceSelector selects.",
    )
    namespace_selector: LabelSelector | None = Field(
        None, description="The namespaces, with from: Namespaces."
    )


class Rollout(Section):
    """How a change reaches the replicas."""

    strategy: RolloutStrategy = Field(
        RolloutStrategy.AUTO,
        description="Surge: a new pod comes first. Replace: an old pod goes first. Auto: Surge, and Replace when the extra pod found no accelerator for 120 seconds and more than one replica is ready.",
    )
    max_surge: int = Field(
        1, ge=0, le=100, description="Pods above the ordered number during a roll-out."
    )
    max_unavailable: int = Field(
        0, ge=0, le=100, description="Pods below the ordered number during a roll-out."
    )
    on_failure: OnFailure = Field(
        OnFailure.ROLLBACK,
        description="Rollback: return to the last revision whose pods were ready for a minute. Hold: stop and say so.",
    )
    engine_updates: EngineUpdates = Field(
        EngineUpdates.ON_SPEC_CHANGE,
        description="When a newer profile behind an alias is taken: with the next change of the spec, or automatically, one service at a time.",
    )
    drain_seconds: int = Field(
        120,
        ge=0,
        le=3600,
        description="Seconds that a pod which goes may take to finish its requests.",
    )
    startup_seconds: int = Field(
        3600,
        ge=60,
        le=86_400,
        description="Seconds that an engine may take to load its model before its start counts as failed.",
    )


class Disruption(Section):
    """The PodDisruptionBudget of the engines."""

    max_unavailable: int = Field(
        1,
        ge=0,
        le=1000,
        description="Replicas that evictions (node drains) may take at a time. 0 blocks node drains for as long as the service lives.",
    )


class LocalReference(Section):
    """An object of the same namespace, by name."""

    name: ObjectName = Field(description="The object's name, in the service's namespace.")


class InferenceServiceSpec(Section):
    """What is wanted."""

    paused: bool = Field(
        False,
        description="Whether Fleetkeeper leaves every child as it is. It still watches and reports.",
    )
    model: Model = Field(description="What is served.")
    engine: Engine = Field(default_factory=Engine, description="How vLLM runs.")
    resources: Resources = Field(
        default_factory=Resources, description="What each replica asks for."
    )
    memory: Memory = Field(default_factory=Memory, description="The cap on memory.")
    placement: Placement = Field(
        default_factory=Placement, description="Where the engine pods run."
    )
    pod_metadata: PodMetadata = Field(
        default_factory=PodMetadata, description="Labels and annotations of the engine pods."
    )
    image_pull_secrets: tuple[LocalReference, ...] = Field(
        (),
        max_length=16,
        description="Secrets with which images are pulled, in the service's namespace.",
    )
    replicas: Replicas | None = Field(
        None,
        description="The ordered number of replicas: by a person, kubectl scale, HPA or KEDA. It wins in every mode. 0 stops the service. Absent means that Fleetkeeper decides.",
    )
    scaling: Scaling = Field(default_factory=Scaling, description="How many replicas.")
    objectives: Objectives = Field(
        default_factory=Objectives, description="What the fleet is held to."
    )
    batching: Batching = Field(
        default_factory=Batching, description="The limits of a batch, and who moves them."
    )
    tiers: Tiers = Field(
        default_factory=Tiers,
        description="The classes of requests, chosen by the request header X-Inference-Tier; without it standard.",
    )
    breaker: Breaker = Field(default_factory=Breaker, description="The circuit breakers.")
    routing: Routing = Field(
        default_factory=Routing, description="The router in front of the engines."
    )
    access: Access = Field(default_factory=Access, description="Who may reach the address.")
    rollout: Rollout = Field(
        default_factory=Rollout, description="How a change reaches the replicas."
    )
    disruption: Disruption = Field(
        default_factory=Disruption, description="The PodDisruptionBudget of the engines."
    )
