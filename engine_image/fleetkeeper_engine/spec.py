"""The document that specifies an engine: JSON in the environment variable FLEETKEEPER_ENGINE.

The operator renders it and the supervisor reads it. Its JSON schema is generated into
engine_image/schemas/engine-document.schema.json, and both sides are tested against that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from fleetkeeper_contract.extra_arguments import (
    MAX_ARGUMENTS,
    MAX_LENGTH,
    argument_errors,
    option_of,
)
from fleetkeeper_contract.traces_endpoint import (
    DEFAULT_SAMPLE_RATIO,
    TracesProtocol,
    endpoint_error,
)
from fleetkeeper_contract.traces_endpoint import PATTERN as TRACES_ENDPOINT
from fleetkeeper_contract.vllm_options import Setter, refused
from fleetkeeper_engine.devices.interface import Accelerator
from fleetkeeper_engine.simulation import Simulation

CONTRACT = 1
"""Version of the document, the metrics and the exit codes. The operator supports N and N-1."""

ENVIRONMENT = "FLEETKEEPER_ENGINE"
GIB = 1024**3

Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?$")
]
ServedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,252}$")]
Location = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/@+ -]{0,1023}$")]
ModelLocation = Annotated[
    str,
    StringConstraints(
        pattern=r"^(s3://[a-z0-9][A-Za-z0-9._=/-]{2,511}|[A-Za-z0-9/][A-Za-z0-9._/@+ -]{0,1023})$"
    ),
]
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{1,62}$")]
MediaDomain = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,252}$")]
OptionValue = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9._/:@][A-Za-z0-9._/:@-]{0,252}$")
]

ExtraArgument = Annotated[str, StringConstraints(pattern=r"^--[a-z]", max_length=MAX_LENGTH)]


class DType(StrEnum):
    """The number format of weights and activations; `auto` is the model's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True
    )


class Adapter(_Section):
    """A LoRA adapter, loaded at start and served under its name."""

    name: Name
    path: Location = Field(
        description="An absolute directory in the container, or ORG/NAME of a Hugging Face adapter."
    )
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,128}$")] | None = Field(
        default=None, description="Commit of a Hugging Face adapter; absent for a directory."
    )


class Model(_Section):
    """The model to load, and the names under which it is served."""

    source: ModelLocation = Field(
        description="An absolute directory in the container, ORG/NAME of a Hugging Face model, or s3://BUCKET/PREFIX."
    )
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,128}$")] | None = Field(
        default=None, description="Commit of a Hugging Face model; absent for a directory."
    )
    served_name: ServedName = Field(description="The name that clients set as `model`.")
    adapters: tuple[Adapter, ...] = Field(default=(), max_length=32)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.served_name, *(adapter.name for adapter in self.adapters)]
        if len(set(names)) < len(names):
            raise ValueError("servedName and the names of the adapters must be unique")
        return self


class Profile(_Section):
    """The part of an engine profile that the engine reads."""

    name: Name
    extra_arguments: tuple[ExtraArgument, ...] = Field(
        min_length=1,
        max_length=MAX_ARGUMENTS,
        description="Arguments of vLLM that an administrator set, as --NAME or --NAME=VALUE.",
    )

    @property
    def options(self) -> list[str]:
        """Return the names of the options that the arguments set."""
        return [option for item in self.extra_arguments if (option := option_of(item))]

    @model_validator(mode="after")
    def _arguments_are_free(self) -> Self:
        if errors := argument_errors(self.extra_arguments):
            raise ValueError(f"engine profile {self.name}: {'; '.join(errors)}")
        return self


class Engine(_Section):
    """Settings with which vLLM runs the model."""

    dtype: DType = Field(default=DType.AUTO, strict=False)
    quantization: Name | None = None
    max_model_length: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Tokens. If absent, the maximum of the model's config.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    prefix_caching: bool = True
    speculative_tokens: int = Field(
        default=0,
        ge=0,
        le=32,
        description="Draft tokens per sequence and step. They count against a step's tokens.",
    )
    options: dict[OptionName, OptionValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Additional vLLM options, already checked by the operator. `true` and `false` become --NAME and --no-NAME.",
    )
    profile: Profile | None = Field(
        default=None, description="Absent if the engine profile sets no arguments."
    )
    media_domains: tuple[MediaDomain, ...] = Field(
        default=(),
        max_length=32,
        description="Hosts from which requests may have the engine fetch images, audio and video. Empty: none.",
    )

    @model_validator(mode="after")
    def _options_are_free(self) -> Self:
        for name in self.options:
            if taken := refused(name, Setter.SERVICE):
                raise ValueError(f"option {name!r} is not settable (it matches {taken.name!r})")
        return self


class Memory(_Section):
    """The memory cap of the pod."""

    cap_percent: int = Field(
        default=80,
        ge=10,
        le=95,
        description="Percentage of the accelerator's memory (cuda) or of limitBytes (cpu).",
    )
    limit_bytes: int | None = Field(
        default=None,
        ge=256 * 1024**2,
        description="The pod's memory limit. If absent, the cgroup's limit, or the machine's memory if there is none.",
    )


class Batching(_Section):
    """Start-up values, which are the ceiling of the live limits, and their floors."""

    max_sequences: int = Field(default=256, ge=1, le=65_536)
    min_sequences: int = Field(default=4, ge=1, le=65_536)
    max_tokens: int = Field(default=8192, ge=1, le=1_048_576, description="Tokens of one step.")
    min_tokens: int = Field(default=256, ge=1, le=1_048_576)

    @model_validator(mode="after")
    def _floors_are_below(self) -> Self:
        if self.min_sequences > self.max_sequences:
            raise ValueError("minSequences must not be above maxSequences")
        if self.min_tokens > self.max_tokens:
            raise ValueError("minTokens must not be above maxTokens")
        if self.max_tokens < self.max_sequences:
            raise ValueError(
                "maxTokens must not be below maxSequences: each running sequence needs one token per step"
            )
        return self


class Tier(_Section):
    """A queue in front of the engine."""

    queue_limit: int = Field(
        ge=0,
        le=1_000_000,
        description="Maximum number of waiting requests. Further requests get 429.",
    )


class BatchTier(Tier):
    """The batch tier, which yields to the others."""

    share_percent: int = Field(
        default=30,
        ge=1,
        le=100,
        description="Maximum percentage of the sequences while other tiers wait.",
    )
    floor_percent: int = Field(
        default=5, ge=0, le=100, description="Guaranteed percentage of the sequences."
    )

    @model_validator(mode="after")
    def _floor_is_below_share(self) -> Self:
        if self.floor_percent > self.share_percent:
            raise ValueError("floorPercent must not be above sharePercent")
        return self


class Tiers(_Section):
    """The three tiers, chosen by the request header X-Inference-Tier."""

    realtime: Tier = Tier(queue_limit=64)
    standard: Tier = Tier(queue_limit=256)
    batch: BatchTier = BatchTier(queue_limit=1024)


class Objectives(_Section):
    """The service's objectives. The pod's own admission rule uses the first."""

    queue_wait_milliseconds: int = Field(default=500, ge=1, le=3_600_000)
    batch_time_milliseconds: int = Field(default=50, ge=1, le=600_000)


class Health(_Section):
    """Deadlines after which an engine counts as hung."""

    stall_seconds: int = Field(
        default=60,
        ge=5,
        le=3600,
        description="The engine is not live after this long with work but without a step.",
    )
    startup_seconds: int = Field(
        default=3600,
        ge=10,
        le=86_400,
        description="The first token must be generated within this time.",
    )


class Drain(_Section):
    """Settings of the pod's drain."""

    seconds: int = Field(
        default=120,
        ge=0,
        le=86_400,
        description="Time for running requests to finish. One clock for preStop and SIGTERM.",
    )
    notice_seconds: int = Field(
        default=5,
        ge=0,
        le=600,
        description="Time for routers to react while the pod is not ready but still serves.",
    )


class Ports(_Section):
    """The addresses on which the pod listens."""

    host: Literal["0.0.0.0", "127.0.0.1", "::", "::1"] = "0.0.0.0"  # noqa: S104 - a pod serves its network
    serving: int = Field(default=8000, ge=1, le=65_535)
    control: int = Field(default=9090, ge=1, le=65_535)


class Control(_Section):
    """The keys that sign requests for limits. The audience is the pod's UID, from the environment POD_UID."""

    issuer: Name = "fleetkeeper"
    keys_directory: Location = "/etc/fleetkeeper/control"


class Tracing(_Section):
    """Spans of requests, sent to a collector of OpenTelemetry. Absent: no spans."""

    endpoint: Annotated[str, StringConstraints(pattern=TRACES_ENDPOINT)] = Field(
        description="Address of the collector, with its port. Over http without a path: /v1/traces."
    )
    protocol: TracesProtocol = Field(default=TracesProtocol.GRPC, strict=False)
    sample_ratio: float = Field(
        default=DEFAULT_SAMPLE_RATIO,
        ge=0,
        le=1,
        description="Share of the requests without a trace context that get spans. A request with one follows it.",
    )
    service: Name | None = Field(
        default=None, description="service.name of the spans. If absent, the model's served name."
    )
    namespace: Name | None = Field(default=None, description="service.namespace of the spans.")

    @model_validator(mode="after")
    def _endpoint_is_usable(self) -> Self:
        if error := endpoint_error(self.endpoint, self.protocol):
            raise ValueError(error)
        return self


class EngineDocument(_Section):
    """Everything that the supervisor needs to know. Unknown fields are refused."""

    contract: Literal[1] = Field(description="Version of this document.")
    accelerator: Accelerator = Field(strict=False)
    model: Model
    engine: Engine = Engine()
    memory: Memory = Memory()
    batching: Batching = Batching()
    tiers: Tiers = Tiers()
    objectives: Objectives = Objectives()
    health: Health = Health()
    drain: Drain = Drain()
    ports: Ports = Ports()
    control: Control = Control()
    tracing: Tracing | None = None
    simulation: Simulation | None = Field(
        default=None, description="Absent for an engine that runs vLLM."
    )

    @model_validator(mode="after")
    def _simulation_needs_no_device(self) -> Self:
        if self.simulation is not None and self.accelerator is not Accelerator.CPU:
            raise ValueError("a simulated engine needs accelerator cpu")
        return self


class InvalidDocumentError(ValueError):
    """The document cannot be used; the message is one line that names every bad field."""


def parse_document(text: str) -> EngineDocument:
    """Return the document in `text` (JSON).

    Raises:
        InvalidDocumentError: with one line that names each wrong field, and why.
    """
    try:
        return EngineDocument.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(_problem(dict(item)) for item in error.errors(include_url=False))
        raise InvalidDocumentError(f"{ENVIRONMENT} is invalid: {problems}") from None


def read_document(environment: Mapping[str, str]) -> EngineDocument:
    """Return the document of this pod.

    Raises:
        InvalidDocumentError: if it is missing or wrong.
    """
    text = environment.get(ENVIRONMENT)
    if not text:
        raise InvalidDocumentError(
            f"{ENVIRONMENT} is not set: it must hold the engine document (one JSON object); "
            "to run an engine without Kubernetes, use `fleetkeeper-engine serve --model DIR`"
        )
    return parse_document(text)


def _problem(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "document"
    message = str(error["msg"]).removeprefix("Value error, ").replace("\n", " ")
    return f"{where}: {message[:200]}"


def contract_files() -> dict[str, str]:
    """Return the generated schema, by path from the repository's root."""
    schema = EngineDocument.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["$id"] = "https://fleetkeeper.io/contract/engine-document.schema.json"
    return {
        "engine_image/schemas/engine-document.schema.json": json.dumps(
            schema, indent=2, sort_keys=True
        )
        + "\n"
    }
