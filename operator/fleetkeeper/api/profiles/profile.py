"""Engine profiles: the images and the vLLM version of engines, from the operator's settings.

Profiles are immutable and versioned, so an upgrade of the operator restarts no engine. An alias is
resolved when a service is created or its spec changes. `status.engine` stores the resolved profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from fleetkeeper.api.base import DNS_SUBDOMAIN, FreeForm, Quantity, Section, StringMap, frozen_map
from fleetkeeper.api.profiles.environment import allows
from fleetkeeper.api.profiles.extra_arguments import extra_argument_errors, options_of
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.api.profiles.pod_template import (
    engine_variables,
    pod_template_errors,
)
from fleetkeeper.api.profiles.pod_template_form import in_stored_form
from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.api.profiles.tracing import OPTION as TRACES_OPTION
from fleetkeeper.api.profiles.tracing import Tracing
from fleetkeeper.api.replica_types import DEFAULT_CAP_PERCENT, MAX_CAP_PERCENT
from fleetkeeper.api.types import (
    Accelerator,
    EnvironmentValue,
    EnvironmentVariable,
    InferenceServiceSpec,
    ProfileName,
    ResourceName,
)
from fleetkeeper.api.values.quantity import canonical_quantity, parse_quantity
from fleetkeeper_contract.extra_arguments import MAX_ARGUMENTS, MAX_LENGTH

EXACT_NAME = re.compile(r"[a-z][-a-z0-9]*-[0-9]+\.[0-9]+\.[0-9]+-[0-9]+")
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?$"
Image = Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)]
EnvironmentName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Z_][A-Z0-9_]*\*?$")
]
OptionName = Annotated[str, Field(min_length=2, max_length=63, pattern=r"^[a-z][a-z0-9-]*$")]
MediaDomain = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
MEDIA_OPTION = "allowed-media-domains"
"""The option of vLLM that `mediaDomains` sets."""
ExtraArgument = Annotated[str, Field(max_length=MAX_LENGTH, pattern=r"^--[a-z]")]
PodTemplate = Annotated[Mapping[str, Any], AfterValidator(in_stored_form), FreeForm()]

CONTRACTS = (1,)
"""The versions of the engine contract that this operator supports: the newest and the previous one."""


class AcceleratorKind(StrEnum):
    """The kind of hardware that an engine runs on."""

    CUDA = "cuda"
    CPU = "cpu"


class Delivery(StrEnum):
    """The ways to provide the supervisor to the engine container."""

    INJECT = "inject"
    BAKED = "baked"


class ResourceDefaults(Section):
    """The resources of a replica for which the spec sets none."""

    accelerator_resource: ResourceName | None = Field(
        None,
        description="Name of the accelerator's extended resource, on cuda profiles. On simulated profiles, replicas have accelerators only if it is set: to test a GPU budget.",
    )
    cpu: Quantity = Field("4", description="Number of CPU cores.")
    memory: Quantity = Field("32Gi", description="Memory in bytes.")
    shared_memory: Quantity = Field("2Gi", description="Size of /dev/shm in bytes.")


class EgressPeer(Section):
    """An address range to which engine pods may connect, in addition to DNS."""

    cidr: str = Field(max_length=64, description="Address range, for example 10.0.0.0/8.")
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(
        (443,), max_length=16, description="TCP ports to which engine pods may connect."
    )


class EngineProfile(Section):
    """An immutable description of an engine: images, vLLM version, contract, and allow-lists."""

    name: str = Field(
        max_length=63,
        description="Exact name: KIND-VLLM_VERSION-NUMBER, for example cuda-0.32.0-1.",
    )
    accelerator: AcceleratorKind = Field(
        description="Kind of hardware that the engine runs on: cuda or cpu."
    )
    vllm_version: str = Field(
        max_length=32, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="Version of vLLM."
    )
    contract: int = Field(1, ge=1, le=1000, description="Version of the engine contract.")
    delivery: Delivery = Field(
        description="inject: an init container copies the supervisor into a stock engine image. baked: the engine image contains the supervisor."
    )
    image: Image = Field(description="Image of the engine.")
    injected_image: Image | None = Field(
        None, description="Image that contains the supervisor. Requires delivery inject."
    )
    resources: ResourceDefaults = Field(
        default_factory=ResourceDefaults,
        description="Resources of a replica for which the spec sets none.",
    )
    options: tuple[OptionName, ...] | None = Field(
        None,
        max_length=512,
        description="Names of the engine options that services may set. Absent means all allowed options of the vLLM version.",
    )
    extra_arguments: tuple[ExtraArgument, ...] = Field(
        (),
        max_length=MAX_ARGUMENTS,
        description="Arguments of vLLM for every engine with this profile, each as --name or --name=value. Services cannot set these options. Options that Fleetkeeper sets are refused.",
    )
    env: tuple[EnvironmentName, ...] = Field(
        ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "NCCL_*"),
        max_length=64,
        description="Names of the environment variables that services may set. A trailing * allows the known harmless names with that prefix, and only with a value in the spec; names without * may also come from a Secret. Names of files, plugins, configurations, and endpoints are never allowed; set them in `variables`.",
    )
    variables: StringMap[EnvironmentValue] = Field(
        default_factory=frozen_map,
        max_length=64,
        description="Environment variables of every engine with this profile, for example HF_ENDPOINT or AWS_ENDPOINT_URL. Services cannot set them.",
    )
    max_cap_percent: int = Field(
        DEFAULT_CAP_PERCENT,
        ge=DEFAULT_CAP_PERCENT,
        le=MAX_CAP_PERCENT,
        description="Maximum of memory.capPercent of services with this profile. Above 80, less memory remains for what cannot be planned.",
    )
    egress: tuple[EgressPeer, ...] = Field(
        (),
        max_length=32,
        description="Address ranges to which engine pods may connect, in addition to DNS.",
    )
    media_domains: tuple[MediaDomain, ...] = Field(
        (),
        max_length=32,
        description="Hosts from which clients may have engines fetch images, audio and video, by the addresses in chat messages, for example images.example.com. Absent: none; media in the request itself (data: URLs) are always allowed. Engines reach the hosts only if `egress` contains their addresses. The engine image must be at least as new as this field.",
    )
    tracing: Tracing | None = Field(
        None,
        description="OpenTelemetry spans of requests. Absent: none. Services cannot change it.",
    )
    pod_template: PodTemplate | None = Field(
        None,
        description="A pod template with metadata and spec, as in Kubernetes, that is merged over every engine pod with this profile: sidecars, volumes, devices, labels. What Fleetkeeper owns is refused.",
    )
    object_storage: ObjectStorage | None = Field(
        None,
        description="Object storage of s3:// models. Absent means that services cannot use s3:// models. The engine image needs runai-model-streamer-s3.",
    )
    simulated: bool = Field(
        False,
        description="Whether engines simulate vLLM: they load no model, use no GPU, and answer with meaningless text. Requires accelerator cpu and delivery baked.",
    )
    simulation: Simulation | None = Field(
        None,
        description="Speed, start and faults of simulated engines. Requires simulated. Absent: the defaults.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if not EXACT_NAME.fullmatch(self.name):
            raise ValueError(
                f"profile {self.name!r}: the name must be KIND-VLLM_VERSION-NUMBER, for example cuda-0.32.0-1"
            )
        if (self.delivery is Delivery.INJECT) != (self.injected_image is not None):
            raise ValueError(
                f"profile {self.name!r}: delivery inject requires injectedImage; delivery baked does not allow it"
            )
        if self.contract not in CONTRACTS:
            raise ValueError(
                f"profile {self.name!r}: this operator does not support engine contract {self.contract}; it supports {', '.join(map(str, CONTRACTS))}"
            )
        if errors := extra_argument_errors(self.extra_arguments):
            raise ValueError(f"profile {self.name!r}: extraArguments: {'; '.join(errors)}")
        if self.tracing is not None and TRACES_OPTION in options_of(self.extra_arguments):
            raise ValueError(
                f"profile {self.name!r}: tracing sets --{TRACES_OPTION}; remove it from extraArguments"
            )
        if self.media_domains and MEDIA_OPTION in options_of(self.extra_arguments):
            raise ValueError(
                f"profile {self.name!r}: mediaDomains sets --{MEDIA_OPTION}; remove it from extraArguments"
            )
        if errors := self._pod_template_errors():
            raise ValueError(f"profile {self.name!r}: {'; '.join(errors)}")
        if errors := self._simulation_errors():
            raise ValueError(f"profile {self.name!r}: {'; '.join(errors)}")
        return self

    def _simulation_errors(self) -> list[str]:
        if not self.simulated:
            return [] if self.simulation is None else ["simulation requires simulated: true"]
        errors = []
        if self.accelerator is not AcceleratorKind.CPU:
            errors.append("simulated requires accelerator cpu")
        if self.delivery is not Delivery.BAKED:
            errors.append("simulated requires delivery baked")
        if self.object_storage is not None:
            errors.append("simulated engines read no model; remove objectStorage")
        return errors

    def _pod_template_errors(self) -> list[str]:
        accelerator = self.resources.accelerator_resource or "nvidia.com/gpu"
        return pod_template_errors(
            self.pod_template or {}, variables=self.variables.keys(), accelerator=accelerator
        )

    def sets_variable(self, name: str) -> bool:
        """Return True if the profile itself sets this environment variable of engines."""
        return name in self.variables or name in engine_variables(self.pod_template or {})

    def allows_env(self, name: str) -> bool:
        """Return True if a service may set this environment variable."""
        return not self.sets_variable(name) and allows(self.env, name)

    def allows_variable(self, variable: EnvironmentVariable) -> bool:
        """Return True if a service may set this variable from this source.

        Only names that `env` lists exactly may come from a Secret: vLLM and NCCL write the values of
        their tuning variables to logs.
        """
        is_exact = variable.value_from is None or variable.name in self.env
        return is_exact and self.allows_env(variable.name)

    def cap_percent(self, spec: InferenceServiceSpec) -> int:
        """Return the memory cap of engines with this profile, in percent."""
        return min(spec.memory.cap_percent, self.max_cap_percent)

    def allows_option(self, name: str) -> bool:
        """Return True if the profile allows services to set this engine option."""
        return self.options is None or name in self.options


class UnknownProfile(LookupError):
    """A name that is neither a profile nor an alias. The message lists the known names."""


class ProfileCatalog(Section):
    """The profiles of an operator, and the aliases that point to them."""

    profiles: tuple[EngineProfile, ...] = Field((), max_length=256, description="Engine profiles.")
    aliases: StringMap[ProfileName] = Field(
        default_factory=frozen_map,
        max_length=64,
        description="Short names of profiles, for example cuda and cpu.",
    )

    @model_validator(mode="after")
    def _resolves(self) -> Self:
        names = [profile.name for profile in self.profiles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"duplicate profiles: {', '.join(twice)}")
        for alias, name in self.aliases.items():
            if name not in names:
                raise ValueError(f"alias {alias!r} points to {name!r}, which is not a profile")
            if alias in names:
                raise ValueError(f"alias {alias!r} is also the name of a profile")
        return self

    def resolve(self, name_or_alias: str) -> EngineProfile:
        """Return the profile with this exact name or alias.

        Raises:
            UnknownProfile: No profile has this name or alias.
        """
        name = self.aliases.get(name_or_alias, name_or_alias)
        for profile in self.profiles:
            if profile.name == name:
                return profile
        known = sorted([*self.aliases, *(profile.name for profile in self.profiles)])
        raise UnknownProfile(
            f"engine profile {name_or_alias!r} does not exist; known profiles: {', '.join(known) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class EffectiveResources:
    """The resources of each replica from spec and profile, as canonical quantities."""

    cpu: str
    memory: str
    shared_memory: str
    accelerator: Accelerator | None
    ephemeral_storage: str | None = None
    claimed_accelerators: int = 0
    """The number of accelerators that claims hold, instead of an extended resource."""

    @property
    def accelerators(self) -> int:
        """Return the number of accelerators of a replica."""
        return self.accelerator.count if self.accelerator else self.claimed_accelerators


def effective_resources(spec: InferenceServiceSpec, profile: EngineProfile) -> EffectiveResources:
    """Return the spec's resources, completed with the profile's defaults.

    On a cuda profile without `resources.accelerator`, a replica gets `engine.tensorParallelSize` of
    the profile's accelerators, or gets as many from `resources.claims`. On a cpu profile it gets none,
    unless it is a simulated one with `acceleratorResource`.
    """
    asked, default = spec.resources, profile.resources
    is_cuda = profile.accelerator is AcceleratorKind.CUDA
    has_accelerators = is_cuda or (profile.simulated and default.accelerator_resource is not None)
    accelerator, claimed = asked.accelerator, 0
    if accelerator is None and is_cuda and asked.claims:
        claimed = spec.engine.tensor_parallel_size
    elif accelerator is None and has_accelerators:
        accelerator = Accelerator(
            resource=default.accelerator_resource or "nvidia.com/gpu",
            count=spec.engine.tensor_parallel_size,
        )
    memory = asked.memory or default.memory
    return EffectiveResources(
        cpu=canonical_quantity(asked.cpu or default.cpu),
        memory=canonical_quantity(memory),
        shared_memory=canonical_quantity(
            asked.shared_memory or _shared_memory_within(memory, default.shared_memory)
        ),
        ephemeral_storage=(
            canonical_quantity(asked.ephemeral_storage) if asked.ephemeral_storage else None
        ),
        claimed_accelerators=claimed,
        accelerator=accelerator if has_accelerators else None,
    )


def _shared_memory_within(memory: str, default: str) -> str:
    """Return the profile's shared memory, or a quarter of `memory` if it exceeds half of `memory`."""
    whole = parse_quantity(memory)
    return default if parse_quantity(default) * 2 <= whole else str(int(whole / 4))
