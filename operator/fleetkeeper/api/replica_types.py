"""The parts of the spec that say what one replica is: model, engine, resources, memory, placement."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import LabelValue, ObjectName, Quantity, Section, StringMap, frozen_map
from fleetkeeper.api.enums import Dtype, Quantization
from fleetkeeper.api.scheduling import Affinity, Toleration

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
        description="Environment variables of the engine; only names that the profile allows, such as HTTPS_PROXY and NCCL_DEBUG. Endpoints, such as HF_ENDPOINT, are set in the profile.",
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
    """What each replica asks for. Request and limit are the same; beside an accelerator, CPU has no limit."""

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
    restart_fragmented: bool = Field(
        False,
        description="Whether a replica whose allocator holds more than 30% unused memory for 10 minutes is drained and restarted: one at a time, at most one an hour, and only while the rest of the fleet is well. Only engines of cuda profiles measure it; on cpu profiles it does nothing. A change restarts nothing.",
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
        description="The PriorityClass of the engine pods. Absent means the cluster's default. Kubernetes' own classes (system-...) are taken only where the operator's settings allow them.",
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
