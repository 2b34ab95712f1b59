"""Engine profiles: which images and which vLLM run, as the operator's settings say.

A profile is immutable and versioned, so that an upgrade of the operator restarts nothing. An alias
is resolved when a service is made or its spec changes; the answer is kept in `status.engine`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from fleetkeeper.api.base import Quantity, Section, StringMap, frozen_map
from fleetkeeper.api.environment import allows, is_administrators
from fleetkeeper.api.options import option_errors
from fleetkeeper.api.plain_words import FieldError
from fleetkeeper.api.quantity import canonical_quantity, parse_quantity
from fleetkeeper.api.types import (
    Accelerator,
    EnvironmentValue,
    InferenceServiceSpec,
    ProfileName,
    ResourceName,
)

EXACT_NAME = re.compile(r"[a-z][-a-z0-9]*-[0-9]+\.[0-9]+\.[0-9]+-[0-9]+")
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?$"
Image = Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)]
EnvironmentName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Z_][A-Z0-9_]*\*?$")
]
OptionName = Annotated[str, Field(min_length=2, max_length=63, pattern=r"^[a-z][a-z0-9-]*$")]

CONTRACTS = (1,)
"""The versions of the engine contract that this operator speaks: the newest and the one before."""


class AcceleratorKind(StrEnum):
    """What an engine computes on."""

    CUDA = "cuda"
    CPU = "cpu"


class Delivery(StrEnum):
    """How our supervisor comes into the engine's container."""

    INJECT = "inject"
    BAKED = "baked"


class ResourceDefaults(Section):
    """What a replica asks for where the spec says nothing."""

    accelerator_resource: ResourceName | None = Field(
        None, description="The extended resource of an accelerator, on cuda profiles."
    )
    cpu: Quantity = Field("4", description="Cores.")
    memory: Quantity = Field("32Gi", description="Memory in bytes.")
    shared_memory: Quantity = Field("2Gi", description="The size of /dev/shm in bytes.")


class EgressPeer(Section):
    """An address that engine pods may call, beyond DNS."""

    cidr: str = Field(max_length=64, description="An address range, for example 10.0.0.0/8.")
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(
        (443,), max_length=16, description="TCP ports."
    )


class EngineProfile(Section):
    """One engine, exactly: images, vLLM version, contract, allow-lists."""

    name: str = Field(
        max_length=63, description="Exact name: KIND-VLLM_VERSION-NUMBER, such as cuda-0.32.0-1."
    )
    accelerator: AcceleratorKind = Field(description="cuda or cpu.")
    vllm_version: str = Field(
        max_length=32, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="The vLLM version."
    )
    contract: int = Field(1, ge=1, le=1000, description="The engine contract's version.")
    delivery: Delivery = Field(
        description="inject: an init container brings the supervisor into a stock image. baked: the image holds it."
    )
    image: Image = Field(description="The engine's image.")
    injected_image: Image | None = Field(
        None, description="The image that brings the supervisor, with delivery inject."
    )
    resources: ResourceDefaults = Field(
        default_factory=ResourceDefaults, description="What a replica asks for by default."
    )
    options: tuple[OptionName, ...] | None = Field(
        None,
        max_length=512,
        description="Engine options that services may set, by name. Absent means the whole allow-list of the vLLM version.",
    )
    env: tuple[EnvironmentName, ...] = Field(
        ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "NCCL_*"),
        max_length=64,
        description="Environment variables that services may set. A trailing * allows the known harmless names with that beginning. Names of files, plugins, configurations and endpoints are never allowed: set them in `variables`.",
    )
    variables: StringMap[EnvironmentValue] = Field(
        default_factory=frozen_map,
        max_length=64,
        description="Environment variables that every engine of the profile gets, such as HF_ENDPOINT or AWS_ENDPOINT_URL. Services cannot set these.",
    )
    egress: tuple[EgressPeer, ...] = Field(
        (), max_length=32, description="Addresses that engine pods may call, beyond DNS."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if not EXACT_NAME.fullmatch(self.name):
            raise ValueError(
                f"profile {self.name!r}: the name must be KIND-VLLM_VERSION-NUMBER, such as cuda-0.32.0-1"
            )
        if (self.delivery is Delivery.INJECT) != (self.injected_image is not None):
            raise ValueError(
                f"profile {self.name!r}: injectedImage is needed with delivery inject, and only there"
            )
        if self.contract not in CONTRACTS:
            raise ValueError(
                f"profile {self.name!r}: engine contract {self.contract} is not spoken by this operator, which speaks {', '.join(map(str, CONTRACTS))}"
            )
        return self

    def allows_env(self, name: str) -> bool:
        """Whether a service may set this environment variable."""
        return name not in self.variables and allows(self.env, name)

    def allows_option(self, name: str) -> bool:
        """Whether a service may set this engine option, as far as the profile is concerned."""
        return self.options is None or name in self.options


class UnknownProfile(LookupError):
    """No profile and no alias has this name; the message lists those there are."""


class ProfileCatalog(Section):
    """All profiles of an operator and the aliases that point to them."""

    profiles: tuple[EngineProfile, ...] = Field((), max_length=256, description="The profiles.")
    aliases: StringMap[ProfileName] = Field(
        default_factory=frozen_map,
        max_length=64,
        description="Short names, each for one profile: cuda, cpu.",
    )

    @model_validator(mode="after")
    def _resolves(self) -> Self:
        names = [profile.name for profile in self.profiles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"profiles given twice: {', '.join(twice)}")
        for alias, name in self.aliases.items():
            if name not in names:
                raise ValueError(f"alias {alias!r} points to {name!r}, which is no profile")
            if alias in names:
                raise ValueError(f"alias {alias!r} is also the name of a profile")
        return self

    def resolve(self, name_or_alias: str) -> EngineProfile:
        """The profile of that exact name or behind that alias.

        Raises:
            UnknownProfile: there is none.
        """
        name = self.aliases.get(name_or_alias, name_or_alias)
        for profile in self.profiles:
            if profile.name == name:
                return profile
        known = sorted([*self.aliases, *(profile.name for profile in self.profiles)])
        raise UnknownProfile(
            f"no engine profile {name_or_alias!r}; there are {', '.join(known) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class EffectiveResources:
    """What each replica asks for once spec and profile are put together. Quantities are canonical."""

    cpu: str
    memory: str
    shared_memory: str
    accelerator: Accelerator | None

    @property
    def accelerators(self) -> int:
        """The number of accelerators of a replica."""
        return self.accelerator.count if self.accelerator else 0


def effective_resources(spec: InferenceServiceSpec, profile: EngineProfile) -> EffectiveResources:
    """The spec's resources, and the profile's where the spec says nothing.

    On a cuda profile without `resources.accelerator`, a replica asks for as many of the profile's
    accelerators as `engine.tensorParallelSize`; on a cpu profile for none.
    """
    asked, default = spec.resources, profile.resources
    accelerator = asked.accelerator
    if accelerator is None and profile.accelerator is AcceleratorKind.CUDA:
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
        accelerator=accelerator if profile.accelerator is AcceleratorKind.CUDA else None,
    )


def _shared_memory_within(memory: str, default: str) -> str:
    """The profile's shared memory, or a quarter of a memory that is too small for it."""
    whole = parse_quantity(memory)
    return default if parse_quantity(default) * 2 <= whole else str(int(whole / 4))


def profile_errors(spec: InferenceServiceSpec, profile: EngineProfile) -> list[FieldError]:
    """What the spec asks and this profile cannot give; every mistake at once."""
    errors = option_errors(spec.engine.options, profile.options)
    errors += [
        FieldError(f"spec.engine.env.{name}", _refusal(name, profile))
        for name in spec.engine.env
        if not profile.allows_env(name)
    ]
    resources = effective_resources(spec, profile)
    if parse_quantity(resources.shared_memory) >= parse_quantity(resources.memory):
        errors.append(
            FieldError(
                "spec.resources.sharedMemory",
                f"is {resources.shared_memory}, must be less than the memory of {resources.memory}; lower it or raise spec.resources.memory",
            )
        )
    if profile.accelerator is AcceleratorKind.CPU:
        errors += _accelerator_errors(spec, profile)
    return errors


def _refusal(name: str, profile: EngineProfile) -> str:
    if name in profile.variables:
        return f"is set by the engine profile {profile.name}; remove it"
    if is_administrators(name):
        return "can only be set by the administrator, as one of the engine profile's variables"
    return (
        f"is not allowed by the engine profile {profile.name}, "
        f"which allows {', '.join(profile.env) or 'none'} (see the reference of engine profiles)"
    )


def _accelerator_errors(spec: InferenceServiceSpec, profile: EngineProfile) -> list[FieldError]:
    errors = []
    if spec.resources.accelerator is not None:
        errors.append(
            FieldError(
                "spec.resources.accelerator",
                f"the engine profile {profile.name} computes on CPUs; remove it or choose a cuda profile",
            )
        )
    if spec.engine.tensor_parallel_size > 1:
        errors.append(
            FieldError(
                "spec.engine.tensorParallelSize",
                f"must be 1 with the engine profile {profile.name}, which computes on CPUs",
            )
        )
    return errors
