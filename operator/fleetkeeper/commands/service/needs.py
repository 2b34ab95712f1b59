"""The accelerators, CPU cores, and memory that a service requires. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.profile import (
    AcceleratorKind,
    EffectiveResources,
    EngineProfile,
    effective_resources,
)
from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.api.values.quantity import parse_quantity
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
    surges = spec.rollout.strategy not in {RolloutStrategy.REPLACE, RolloutStrategy.SWAP}
    return Needs(
        profile=profile,
        resources=effective_resources(spec, profile),
        least=least,
        most=most,
        surge=rollout_pods(spec.rollout, most)[0] if surges else 0,
        max_surge=spec.rollout.max_surge,
        cap_percent=spec.memory.cap_percent,
    )
