"""The parts of the spec about a single replica: model, engine, resources, memory, and placement."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import LabelValue, ObjectName, Quantity, Section, StringMap, frozen_map
from fleetkeeper.api.enums import Dtype, Quantization
from fleetkeeper.api.model_source import MODEL_SOURCE
from fleetkeeper.api.scheduling import (
    DEFAULT_SPREAD,
    Affinity,
    Toleration,
    TopologySpreadConstraint,
)
from fleetkeeper.api.values.form import Form
from fleetkeeper.api.variables import EnvironmentVariable, SecretKey

ModelSource = Annotated[str, Field(min_length=1, max_length=512), MODEL_SOURCE]
GitRevision = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Form(
        r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        "is not the name of a revision; set it to a commit of 40 hexadecimal digits",
    ),
]
ServedName = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Form(
        r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
        "must begin with a letter or a digit, followed by letters, digits, and ._:/-, such as meta/llama-3.1:8b",
    ),
]
DEFAULT_CAP_PERCENT = 80
"""The memory cap if the spec sets none, and the maximum of an engine profile that sets none."""
MAX_CAP_PERCENT = 95
"""The maximum of any engine profile. The rest is for what cannot be planned."""
OPTION_VALUE_MAX_LENGTH = 253
OptionValue = Annotated[str, Field(max_length=OPTION_VALUE_MAX_LENGTH)]
AnnotationValue = Annotated[str, Field(max_length=4096)]
ProfileName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Form(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "is not the name of an engine profile; write an alias or an exact name, such as cuda or cuda-0.32.0-1",
    ),
]
ResourceName = Annotated[
    str,
    Field(min_length=1, max_length=240),
    Form(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        "is not the name of an extended resource; write DOMAIN/NAME, such as nvidia.com/gpu",
    ),
]
DnsLabel = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Form(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        "must consist of lowercase letters, digits, and inner hyphens, such as gpu-0",
    ),
]
AdapterName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Form(
        r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "must begin and end with a letter or a digit and have only letters, digits, and -_. between them, such as sql-v2",
    ),
]


class ModelCache(Section):
    """The storage of downloaded models. Exactly one of the two fields is set."""

    claim_name: ObjectName | None = Field(
        None,
        description="Name of a PersistentVolumeClaim in the service's namespace. All pods share it, so it must allow several pods to write.",
    )
    ephemeral_size: Quantity | None = Field(
        None,
        description="Size limit of an emptyDir volume in each pod, for example 100Gi. Every new pod downloads the model again.",
    )


class Adapter(Section):
    """A LoRA adapter, loaded when the engine starts."""

    name: AdapterName = Field(
        description="Name of the adapter in requests (the field `model` of a request).",
    )
    source: ModelSource = Field(
        description="Location of the adapter, in one of the forms of the model's source."
    )
    revision: GitRevision | None = Field(
        None, description="Commit of an hf:// adapter: 40 hexadecimal digits."
    )


class Model(Section):
    """The model that the service serves."""

    source: ModelSource = Field(
        description="Location of the model: pvc://CLAIM/PATH (a PersistentVolumeClaim in the service's namespace), hf://ORG/NAME (Hugging Face), s3://BUCKET/PREFIX (object storage, streamed into memory at each start), or oci://REGISTRY/REPOSITORY@sha256:DIGEST/PATH (an image that the kubelet mounts; PATH is a directory in it and may be absent). s3:// requires an engine profile with objectStorage."
    )
    revision: GitRevision | None = Field(
        None,
        description="Commit of an hf:// model: 40 hexadecimal digits. Branches and tags are allowed only if the operator's settings allow floating revisions.",
    )
    served_name: ServedName | None = Field(
        None,
        description="Name of the model in requests. Absent means the name of the service.",
    )
    token_secret: SecretKey | None = Field(
        None,
        description="Secret with the Hugging Face token, for models that require one. Pods reference it by name; the operator never reads it.",
    )
    credentials_secret: ObjectName | None = Field(
        None,
        description="Name of a Secret in the service's namespace with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for an s3:// model. Absent means the identity of serviceAccountName. Pods reference it by name; the operator never reads it.",
    )
    cache: ModelCache | None = Field(
        None,
        description="Storage of downloaded hf:// models. Absent means that every new pod downloads the model again.",
    )
    adapters: tuple[Adapter, ...] = Field(
        (),
        max_length=32,
        description="LoRA adapters that the engine loads when it starts. At most 32.",
    )


class Engine(Section):
    """The configuration of vLLM."""

    profile: ProfileName = Field(
        "cuda",
        description="Engine profile: an alias (cuda, cpu) or an exact name (cuda-0.32.0-1). Profiles are settings of the operator. An alias is resolved when the service is created and when its spec changes.",
    )
    dtype: Dtype = Field(
        Dtype.AUTO, description="Data type of weights and activations. auto follows the model."
    )
    quantization: Quantization | None = Field(
        None,
        description="Quantization method of the weights. Absent means the method in the model's configuration.",
    )
    max_model_length: Annotated[int, Field(ge=128, le=10_000_000)] | None = Field(
        None,
        description="Maximum length of a sequence (prompt plus response) in tokens. Absent means the limit of the model.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=16,
        description="Number of accelerators over which each layer of the model is split.",
    )
    prefix_caching: bool = Field(
        True,
        description="Whether requests share the KV cache of common prompt prefixes.",
    )
    options: StringMap[OptionValue] = Field(
        default_factory=frozen_map,
        max_length=64,
        description='Further vLLM options by name without leading dashes, with string values, for example enforce-eager: "true". Only the options in the reference are allowed.',
    )
    env: tuple[EnvironmentVariable, ...] = Field(
        (),
        max_length=32,
        description="Environment variables of the engine. Only names that the profile allows can be set, for example HTTPS_PROXY and NCCL_DEBUG. Endpoints, for example HF_ENDPOINT, are set in the profile.",
    )


class Accelerator(Section):
    """The accelerators of each replica."""

    resource: ResourceName = Field(
        "nvidia.com/gpu",
        description="Name of the extended resource. MIG profiles have their own resource names, for example nvidia.com/mig-3g.40gb.",
    )
    count: int = Field(
        1,
        ge=1,
        le=16,
        description="Number of accelerators of each replica. Must equal engine.tensorParallelSize.",
    )


class DeviceClaim(Section):
    """Devices of each replica by Dynamic Resource Allocation. Exactly one of the two references is set."""

    name: DnsLabel = Field(description="Name of the claim within the pod.")
    resource_claim_template_name: ObjectName | None = Field(
        None,
        description="Name of a ResourceClaimTemplate in the service's namespace. Every replica gets its own claim, and so its own devices.",
    )
    resource_claim_name: ObjectName | None = Field(
        None,
        description="Name of a ResourceClaim in the service's namespace. All replicas share its devices, also the new and the old ones in a rollout, and run only on nodes that reach them. Engines cannot share an accelerator, because each plans with memory.capPercent of its whole memory. So use it only for devices that can be shared, such as network devices.",
    )
    request: DnsLabel | None = Field(
        None,
        description="Name of a request in the claim. The engine gets only its devices. Absent means all devices of the claim.",
    )


class Resources(Section):
    """The resources of each replica. Requests equal limits, but CPU has no limit with accelerators."""

    accelerator: Accelerator | None = Field(
        None,
        description="Accelerators of each replica. Absent means the profile's default: engine.tensorParallelSize times nvidia.com/gpu on cuda profiles, none on cpu profiles. With claims, absent means that the claims hold the accelerators.",
    )
    claims: tuple[DeviceClaim, ...] = Field(
        (),
        max_length=16,
        description="Devices of each replica by Dynamic Resource Allocation, in Kubernetes 1.34 or later. On cuda profiles without accelerator, the claims must hold engine.tensorParallelSize accelerators. The GPU budget and the status count this number. The operator never reads claims.",
    )
    cpu: Quantity | None = Field(
        None,
        description="Number of CPU cores of each replica, for example 4. Absent means the profile's default.",
    )
    memory: Quantity | None = Field(
        None,
        description="Memory of each replica in bytes, for example 32Gi. Absent means the profile's default.",
    )
    shared_memory: Quantity | None = Field(
        None,
        description="Size of /dev/shm in bytes, for example 2Gi. It is part of memory. Absent means the profile's default.",
    )
    ephemeral_storage: Quantity | None = Field(
        None,
        description="Local disk space of each replica in bytes, for example 200Gi. Logs, temporary files, and a model cache without a claim count. The kubelet evicts a pod that uses more. Absent means no request and no limit.",
    )


class Memory(Section):
    """The memory cap, and the handling of fragmented memory."""

    cap_percent: int = Field(
        DEFAULT_CAP_PERCENT,
        ge=10,
        le=MAX_CAP_PERCENT,
        description="Maximum share of memory that a replica may use, in percent: of the accelerator's memory on cuda profiles, of resources.memory on cpu profiles. More than 80 requires an engine profile whose maxCapPercent allows it.",
    )
    restart_fragmented: bool = Field(
        False,
        description="Whether Fleetkeeper drains and restarts a replica whose allocator has held more than 30% unused memory for 10 minutes: one at a time, at most one per hour, and only while the rest of the fleet is healthy. It has no effect on cpu profiles. Changing this field restarts no replica.",
    )


class Placement(Section):
    """The scheduling of the engine pods."""

    node_selector: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels that a node must have to run engine pods.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), max_length=32, description="Taints that the engine pods tolerate."
    )
    affinity: Affinity = Field(
        default_factory=Affinity,
        description="Affinity rules as in a Kubernetes pod. Pod affinity applies to the service's namespace only.",
    )
    priority_class_name: ObjectName | None = Field(
        None,
        description="PriorityClass of the engine pods. Absent means the cluster's default. System classes (system-...) are allowed only if the operator's settings allow them.",
    )
    runtime_class_name: ObjectName | None = Field(
        None, description="RuntimeClass of the engine pods. Absent means the cluster's default."
    )
    scheduler_name: ObjectName | None = Field(
        None, description="Scheduler of the engine pods. Absent means the cluster's default."
    )
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = Field(
        DEFAULT_SPREAD,
        max_length=16,
        description="Spread of the replicas over topology domains, as in a Kubernetes pod. Each revision of the engines counts separately. Absent means that the scheduler prefers different zones and nodes and never delays a pod to do so. [] turns spreading off.",
    )


_NAMES = "The prefix fleetkeeper.io/ and the name app.kubernetes.io/managed-by are reserved. Names with a dot or a domain must be in the operator's settings (podMetadataNames)."


class PodMetadata(Section):
    """Additional labels and annotations of the engine pods, for queues, meshes, and cost tools."""

    labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description=f"Additional labels of the engine pods. {_NAMES}",
    )
    annotations: StringMap[AnnotationValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description=f"Additional annotations of the engine pods. {_NAMES}",
    )
