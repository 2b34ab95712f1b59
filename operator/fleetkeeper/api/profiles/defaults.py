"""The engine profiles of a chart with default values.

Entries are immutable: add an entry with a higher number instead of changing one. A changed image or
default would change the pod template and restart every engine that uses the profile.
"""

from __future__ import annotations

from types import MappingProxyType

from fleetkeeper.api.profiles.profile import (
    AcceleratorKind,
    Delivery,
    EngineProfile,
    ProfileCatalog,
    ResourceDefaults,
)


def default_catalog() -> ProfileCatalog:
    """Return the profiles of a chart with default values, with the aliases `cuda` and `cpu`.

    `cuda-0.32.0-1` injects the supervisor into the stock image. `cpu-0.32.0-1` has it built in.
    """
    return ProfileCatalog(
        profiles=(
            EngineProfile(
                name="cpu-0.32.0-1",
                accelerator=AcceleratorKind.CPU,
                vllm_version="0.32.0",
                contract=1,
                delivery=Delivery.BAKED,
                image="fleetkeeper-engine-cpu:0.1.0",
                injected_image=None,
                resources=ResourceDefaults(
                    accelerator_resource=None, cpu="4", memory="16Gi", shared_memory="1Gi"
                ),
            ),
            EngineProfile(
                name="cuda-0.32.0-1",
                accelerator=AcceleratorKind.CUDA,
                vllm_version="0.32.0",
                contract=1,
                delivery=Delivery.INJECT,
                image="vllm/vllm-openai:v0.32.0",
                injected_image="fleetkeeper-engine:0.1.0",
                resources=ResourceDefaults(
                    accelerator_resource="nvidia.com/gpu",
                    cpu="4",
                    memory="32Gi",
                    shared_memory="2Gi",
                ),
            ),
        ),
        aliases=MappingProxyType({"cpu": "cpu-0.32.0-1", "cuda": "cuda-0.32.0-1"}),
    )


def simulated_catalog() -> ProfileCatalog:
    """Return the profiles of a chart with `simulatedEngines: true`."""
    default = default_catalog()
    simulated = EngineProfile(
        name="simulated-0.32.0-1",
        accelerator=AcceleratorKind.CPU,
        vllm_version="0.32.0",
        contract=1,
        delivery=Delivery.BAKED,
        image="fleetkeeper-engine-simulated:0.1.0",
        injected_image=None,
        resources=ResourceDefaults(
            accelerator_resource=None, cpu="50m", memory="256Mi", shared_memory="64Mi"
        ),
        simulated=True,
    )
    return ProfileCatalog(
        profiles=(*default.profiles, simulated),
        aliases=MappingProxyType({**default.aliases, "simulated": simulated.name}),
    )
