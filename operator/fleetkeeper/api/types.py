"""The spec of an InferenceService as frozen values: fields, defaults, bounds, and descriptions.

The CRD and the reference are generated from these classes. Never change a default that reaches a pod
template: that would restart engines. A default never depends on another field or a profile. Values
that do are computed in `fleetkeeper.api.profiles.profile` and shown in `status.effective`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import ObjectName, Section
from fleetkeeper.api.enums import (
    AccessMode,
    BatchingMode,
    BreakerMode,
    Dtype,
    EngineUpdates,
    NetworkPreset,
    OnFailure,
    Quantization,
    RolloutStrategy,
    RoutingPolicy,
    ScalingMode,
    ServiceType,
)
from fleetkeeper.api.fleet_types import (
    Batching,
    BatchTier,
    Breaker,
    Disruption,
    Objectives,
    RealtimeTier,
    Rollout,
    RouterPlacement,
    RouterResources,
    Routing,
    Scaling,
    Tier,
    Tiers,
)
from fleetkeeper.api.network_types import CidrBlock, NetworkPeer, NetworkPolicy, Service
from fleetkeeper.api.replica_types import (
    OPTION_VALUE_MAX_LENGTH,
    Accelerator,
    Adapter,
    AnnotationValue,
    DeviceClaim,
    Engine,
    GitRevision,
    Memory,
    Model,
    ModelCache,
    ModelSource,
    OptionValue,
    Placement,
    PodMetadata,
    ProfileName,
    ResourceName,
    Resources,
    ServedName,
)
from fleetkeeper.api.variables import EnvironmentValue, EnvironmentVariable, SecretKey

__all__ = [
    "OPTION_VALUE_MAX_LENGTH",
    "Accelerator",
    "AccessMode",
    "Adapter",
    "AnnotationValue",
    "BatchTier",
    "Batching",
    "BatchingMode",
    "Breaker",
    "BreakerMode",
    "CidrBlock",
    "DeviceClaim",
    "Disruption",
    "Dtype",
    "Engine",
    "EngineUpdates",
    "EnvironmentValue",
    "EnvironmentVariable",
    "GitRevision",
    "InferenceServiceSpec",
    "LocalReference",
    "Memory",
    "Model",
    "ModelCache",
    "ModelSource",
    "NetworkPeer",
    "NetworkPolicy",
    "NetworkPreset",
    "Objectives",
    "OnFailure",
    "OptionValue",
    "Placement",
    "PodMetadata",
    "ProfileName",
    "Quantization",
    "RealtimeTier",
    "Replicas",
    "ResourceName",
    "Resources",
    "Rollout",
    "RolloutStrategy",
    "RouterPlacement",
    "RouterResources",
    "Routing",
    "RoutingPolicy",
    "Scaling",
    "ScalingMode",
    "SecretKey",
    "ServedName",
    "Service",
    "ServiceType",
    "Tier",
    "Tiers",
]

Replicas = Annotated[int, Field(ge=0, le=1000)]


class LocalReference(Section):
    """A reference to an object in the same namespace."""

    name: ObjectName = Field(description="Name of the object in the service's namespace.")


class InferenceServiceSpec(Section):
    """The desired state of an InferenceService."""

    paused: bool = Field(
        False,
        description="Whether Fleetkeeper stops changing child objects. It still watches the service and updates its status.",
    )
    suspend: bool = Field(
        False,
        description="Whether the service runs without replicas. When it is false again, the service has as many replicas as before. With paused, nothing changes until paused is false.",
    )
    model: Model = Field(description="Model that the service serves.")
    engine: Engine = Field(default_factory=Engine, description="Configuration of vLLM.")
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of each replica. Requests equal limits, except that CPU has no limit on replicas with accelerators.",
    )
    memory: Memory = Field(
        default_factory=Memory, description="Memory cap, and handling of fragmented memory."
    )
    placement: Placement = Field(
        default_factory=Placement, description="Scheduling of the engine pods."
    )
    pod_metadata: PodMetadata = Field(
        default_factory=PodMetadata,
        description="Additional labels and annotations of the engine pods.",
    )
    image_pull_secrets: tuple[LocalReference, ...] = Field(
        (),
        max_length=16,
        description="Image pull secrets in the service's namespace.",
    )
    service_account_name: ObjectName | None = Field(
        None,
        description="ServiceAccount of the engine pods in the service's namespace, for workload identity. The operator's settings must allow it. Its token is never mounted. Absent means the namespace's default ServiceAccount.",
    )
    replicas: Replicas | None = Field(
        None,
        description="Fixed number of replicas, set by a person, kubectl scale, HPA, or KEDA. It takes precedence in every scaling.mode. 0 stops the service. Absent means that Fleetkeeper sets the number.",
    )
    scaling: Scaling = Field(default_factory=Scaling, description="Mode and bounds of scaling.")
    objectives: Objectives = Field(
        default_factory=Objectives, description="Service level objectives of the fleet."
    )
    batching: Batching = Field(
        default_factory=Batching,
        description="Bounds of the batch limits, and the mode in which they change.",
    )
    tiers: Tiers = Field(
        default_factory=Tiers,
        description="Classes of requests. The request header X-Inference-Tier selects one; the default is standard.",
    )
    breaker: Breaker = Field(
        default_factory=Breaker,
        description="Circuit breakers that protect users from overload and the fleet from bad decisions.",
    )
    routing: Routing = Field(default_factory=Routing, description="Router in front of the engines.")
    service: Service = Field(
        default_factory=Service, description="Kubernetes Service that clients call."
    )
    access: AccessMode = Field(
        AccessMode.OPEN,
        description="Open: engines accept requests from every client that can connect. Gateway: engines accept only requests that Fleetkeeper's gateway signed, and take the tier from the signature instead of X-Inference-Tier. A change reaches running engines within about two minutes, without a restart.",
    )
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy,
        description="Clients that may connect to the service. The network plugin must enforce NetworkPolicies.",
    )
    rollout: Rollout = Field(
        default_factory=Rollout, description="Rollout of changes to the replicas."
    )
    disruption: Disruption = Field(
        default_factory=Disruption, description="PodDisruptionBudget of the engines."
    )
