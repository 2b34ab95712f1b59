"""The spec of an InferenceService as frozen values: fields, defaults, bounds, descriptions.

The one source of the CRD and of the reference. A default here can never change once it reaches a
pod template, and never depends on another field or a profile: what depends is worked out
(`fleetkeeper.api.profile`) and shown in `status.effective`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import ObjectName, Section
from fleetkeeper.api.enums import (
    AccessFrom,
    BatchingMode,
    BreakerMode,
    Dtype,
    EngineUpdates,
    OnFailure,
    Quantization,
    RolloutStrategy,
    RoutingPolicy,
    ScalingMode,
)
from fleetkeeper.api.fleet_types import (
    Access,
    Batching,
    BatchTier,
    Breaker,
    Disruption,
    Objectives,
    RealtimeTier,
    Rollout,
    Routing,
    Scaling,
    Tier,
    Tiers,
)
from fleetkeeper.api.replica_types import (
    OPTION_VALUE_MAX_LENGTH,
    Accelerator,
    Adapter,
    AnnotationValue,
    Engine,
    EnvironmentValue,
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
    SecretKey,
    ServedName,
)

__all__ = [
    "OPTION_VALUE_MAX_LENGTH",
    "Accelerator",
    "Access",
    "AccessFrom",
    "Adapter",
    "AnnotationValue",
    "BatchTier",
    "Batching",
    "BatchingMode",
    "Breaker",
    "BreakerMode",
    "Disruption",
    "Dtype",
    "Engine",
    "EngineUpdates",
    "EnvironmentValue",
    "GitRevision",
    "InferenceServiceSpec",
    "LocalReference",
    "Memory",
    "Model",
    "ModelCache",
    "ModelSource",
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
    "Routing",
    "RoutingPolicy",
    "Scaling",
    "ScalingMode",
    "SecretKey",
    "ServedName",
    "Tier",
    "Tiers",
]

Replicas = Annotated[int, Field(ge=0, le=1000)]


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
