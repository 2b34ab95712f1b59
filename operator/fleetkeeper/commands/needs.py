"""The accelerators, CPU cores, and memory that a service requires. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from fleetkeeper.api.int_or_percent import is_zero
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profile import (
    AcceleratorKind,
    EffectiveResources,
    EngineProfile,
    effective_resources,
)
from fleetkeeper.api.quantity import parse_quantity
from fleetkeeper.api.schema.object_storage_rules import is_object_source
from fleetkeeper.api.types import (
    AccessMode,
    InferenceServiceSpec,
    NetworkPreset,
    RolloutStrategy,
    RoutingPolicy,
    ScalingMode,
    ServiceType,
)
from fleetkeeper.reconcile.manifests.rollout import rollout_pods

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of a service for `least` to `most` replicas and `surge` extra rollout pods."""

    profile: EngineProfile
    resources: EffectiveResources
    least: int
    most: int
    surge: int
    max_surge: int | str
    cap_percent: int

    def accelerators(self, replicas: int) -> int:
        """Return the number of accelerators of this number of replicas."""
        return replicas * self.resources.accelerators

    def cores(self, replicas: int) -> Decimal:
        """Return the number of CPU cores of this number of replicas."""
        return replicas * parse_quantity(self.resources.cpu)

    def memory_gib(self, replicas: int) -> Decimal:
        """Return the memory of this number of replicas in GiB."""
        return replicas * parse_quantity(self.resources.memory) / GIB

    @property
    def capped_memory_gib(self) -> Decimal | None:
        """Return the pod memory in GiB that a replica may use, None on cuda profiles (no pod memory cap)."""
        if self.profile.accelerator is AcceleratorKind.CUDA:
            return None
        return self.memory_gib(1) * self.cap_percent / 100


def needs_of(service: InferenceService, profile: EngineProfile) -> Needs:
    """Return the requirements of the service."""
    spec = service.spec
    least, most = spec.scaling.min_replicas, spec.scaling.max_replicas
    if spec.replicas is not None:
        least = most = spec.replicas
    surges = spec.rollout.strategy is not RolloutStrategy.REPLACE
    return Needs(
        profile=profile,
        resources=effective_resources(spec, profile),
        least=least,
        most=most,
        surge=rollout_pods(spec.rollout, most)[0] if surges else 0,
        max_surge=spec.rollout.max_surge,
        cap_percent=spec.memory.cap_percent,
    )


def advice_of(service: InferenceService, profile: EngineProfile) -> list[str]:
    """Return notes on settings that are valid but often surprise users."""
    spec = service.spec
    advice = _simulated_advice(profile) if profile.simulated else _model_advice(spec)
    if spec.suspend:
        advice.append("suspend is true: the service runs no replica until it is false")
    if is_zero(spec.disruption.max_unavailable):
        advice.append("disruption.maxUnavailable is 0: node drains are blocked")
    if spec.replicas is not None and spec.scaling.mode is not ScalingMode.EXTERNAL:
        advice.append(
            f"replicas is {spec.replicas}: Fleetkeeper adjusts only batch limits and does not scale"
        )
    if spec.scaling.mode is ScalingMode.AUTO and spec.scaling.min_replicas == 1:
        advice.append(
            "scaling.minReplicas is 1: the service is unavailable while its only replica restarts"
        )
    advice += _network_advice(spec)
    if spec.routing.policy is not RoutingPolicy.NONE and spec.routing.replicas == 1:
        advice.append(
            "routing.replicas is 1: the service is unavailable while its only router pod is replaced"
        )
    return advice


def _simulated_advice(profile: EngineProfile) -> list[str]:
    return [
        f"the engine profile {profile.name} is simulated: no model answers; model, accelerators and claims of the service are not used; the chart needs simulatedEngines: true"
    ]


def _model_advice(spec: InferenceServiceSpec) -> list[str]:
    advice = []
    if spec.model.source.startswith("hf://") and spec.model.cache is None:
        advice.append("model.cache is not set: every new pod downloads the model again")
    if is_object_source(spec.model.source):
        advice.append(
            "model.source is s3://: new pods load what is at the prefix when they start; use a new prefix for each version"
        )
    sources = (spec.model.source, *(adapter.source for adapter in spec.model.adapters))
    if any(source.startswith("oci://") for source in sources):
        advice.append(
            "oci:// needs image volumes: Kubernetes 1.35, or 1.33 with the feature gate ImageVolume, and containerd 2.1 or CRI-O 1.31"
        )
    return advice


def _network_advice(spec: InferenceServiceSpec) -> list[str]:
    policy, advice = spec.network_policy, []
    if spec.service.type is not ServiceType.CLUSTER_IP and not policy.cidrs:
        advice.append(
            f"service.type is {spec.service.type}, but networkPolicy.cidrs is empty: a network that enforces policies lets no client outside the cluster connect"
        )
    if spec.access is AccessMode.GATEWAY and policy.preset is not NetworkPreset.GATEWAY:
        advice.append(
            f"access is Gateway, but networkPolicy.preset is {policy.preset}: other pods can connect, and only the engines refuse them"
        )
    return advice
