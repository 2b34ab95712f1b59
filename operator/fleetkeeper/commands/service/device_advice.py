"""Notes of `fleetkeeper check` on accelerators: what no cluster, or few clusters, can give."""

from __future__ import annotations

from fleetkeeper.api.profiles.profile import AcceleratorKind
from fleetkeeper.api.types import AccessMode, InferenceServiceSpec, RolloutStrategy
from fleetkeeper.commands.service.needs import Needs

USUAL_MAX_PER_NODE = 8
"""The accelerators of the largest common GPU nodes (HGX, DGX, p5, a3, ND H100 v5)."""
SHARED_SUFFIX = ".shared"
"""The end of the resource names that NVIDIA's device plugin gives to time-sliced and MPS devices."""


def device_advice(spec: InferenceServiceSpec, needs: Needs) -> list[str]:
    """Return the notes on the accelerators of a service."""
    if needs.profile.accelerator is not AcceleratorKind.CUDA:
        return []
    return [*_rollout(spec, needs), *_size(needs), *_vendor(needs), *_shared(spec, needs)]


def _rollout(spec: InferenceServiceSpec, needs: Needs) -> list[str]:
    if needs.most == 1:
        return _rollout_of_one(spec, needs)
    more = needs.accelerators(needs.surge)
    if not more or not needs.most or spec.rollout.strategy is not RolloutStrategy.SURGE:
        return []
    return [
        f"rollout.strategy is Surge: without {_free(more)}, a rollout waits and removes no old replica; Auto removes one after 120 s, Replace at once"
    ]


def _rollout_of_one(spec: InferenceServiceSpec, needs: Needs) -> list[str]:
    """Return what a change costs if the only replica has the last accelerator."""
    strategy, more = spec.rollout.strategy, needs.accelerators(needs.surge)
    ways = "Replace stops the replica first, and requests fail meanwhile; Swap holds them and needs access: Gateway"
    if spec.access is AccessMode.GATEWAY:
        ways = (
            "set rollout.strategy to Swap: the gateway holds requests while the replica is replaced"
        )
    if strategy is RolloutStrategy.REPLACE and needs.resources.accelerators:
        what = "rollout.strategy is Replace, and there is one replica: requests fail while it is replaced"
        swap = "Swap holds them and needs access: Gateway"
        return [f"{what}; {ways if spec.access is AccessMode.GATEWAY else swap}"]
    if strategy is RolloutStrategy.SURGE and more:
        what = "rollout.strategy is Surge, and there is one replica"
        return [f"{what}: without {_free(more)}, a rollout fails after 10 minutes; {ways}"]
    if strategy is RolloutStrategy.AUTO and more:
        return [f"with one replica, a rollout waits for {_free(more)}; {ways}"]
    return []


def _free(accelerators: int) -> str:
    return f"{accelerators} free accelerator{'s' * (accelerators > 1)}"


def _size(needs: Needs) -> list[str]:
    count = needs.resources.accelerators
    if count <= USUAL_MAX_PER_NODE:
        return []
    return [
        f"each replica needs {count} accelerators on one node, and most nodes have at most {USUAL_MAX_PER_NODE}: without a larger node, no replica starts"
    ]


def _vendor(needs: Needs) -> list[str]:
    accelerator, profile = needs.resources.accelerator, needs.profile
    if accelerator is None or accelerator.resource.startswith("nvidia.com/"):
        return []
    if accelerator.resource == profile.resources.accelerator_resource:
        return []
    return [
        f"resources.accelerator.resource is {accelerator.resource}, but the engine profile {profile.name} runs only on NVIDIA GPUs, which are nvidia.com/gpu with NVIDIA's device plugin"
    ]


def _shared(spec: InferenceServiceSpec, needs: Needs) -> list[str]:
    accelerator, cap = needs.resources.accelerator, spec.memory.cap_percent
    if accelerator is not None and accelerator.resource.endswith(SHARED_SUFFIX):
        shared = f"{accelerator.resource} is a device that several pods share"
    elif accelerator is None and any(c.resource_claim_name for c in spec.resources.claims):
        shared = "all replicas share the devices of a claim by resourceClaimName"
    else:
        return []
    return [
        f"{shared}, but each engine plans with {cap}% of its whole memory (memory.capPercent): a second engine does not start; use MIG, whole devices, or a resourceClaimTemplateName"
    ]
