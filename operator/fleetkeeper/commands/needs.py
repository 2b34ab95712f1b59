"""What a service will need of a cluster: accelerators, cores, memory. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profile import (
    AcceleratorKind,
    EffectiveResources,
    EngineProfile,
    effective_resources,
)
from fleetkeeper.api.quantity import parse_quantity
from fleetkeeper.api.types import RolloutStrategy, RoutingPolicy, ScalingMode

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one service. `least` and `most` are replicas; `surge` are extra pods during a roll-out."""

    profile: EngineProfile
    resources: EffectiveResources
    least: int
    most: int
    surge: int
    cap_percent: int

    def accelerators(self, replicas: int) -> int:
        """Accelerators for so many replicas."""
        return replicas * self.resources.accelerators

    def cores(self, replicas: int) -> Decimal:
        """Cores for so many replicas."""
        return replicas * parse_quantity(self.resources.cpu)

    def memory_gib(self, replicas: int) -> Decimal:
        """GiB of memory for so many replicas."""
        return replicas * parse_quantity(self.resources.memory) / GIB

    @property
    def capped_memory_gib(self) -> Decimal | None:
        """What one replica may use of its pod's memory, on cpu profiles (else the accelerator's counts)."""
        if self.profile.accelerator is AcceleratorKind.CUDA:
            return None
        return self.memory_gib(1) * self.cap_percent / 100


def needs_of(service: InferenceService, profile: EngineProfile) -> Needs:
    """What the service will need."""
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
        surge=spec.rollout.max_surge if surges else 0,
        cap_percent=spec.memory.cap_percent,
    )


def advice_of(service: InferenceService) -> list[str]:
    """What is allowed and yet surprises people."""
    spec = service.spec
    advice = []
    if spec.disruption.max_unavailable == 0:
        advice.append("disruption.maxUnavailable is 0: node drains wait for ever")
    if spec.model.source.startswith("hf://") and spec.model.cache is None:
        advice.append("no model.cache: every new pod downloads the model again")
    if spec.replicas is not None and spec.scaling.mode is not ScalingMode.EXTERNAL:
        advice.append(
            f"replicas is {spec.replicas}: Fleetkeeper does not scale while it is set, only batches follow the load"
        )
    if spec.scaling.mode is ScalingMode.AUTO and spec.scaling.min_replicas == 1:
        advice.append("scaling.minReplicas is 1: while its pod restarts, nothing answers")
    if spec.routing.policy is not RoutingPolicy.NONE and spec.routing.replicas == 1:
        advice.append("routing.replicas is 1: while the router pod moves, nothing answers")
    return advice
