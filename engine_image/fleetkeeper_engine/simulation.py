"""The section of the engine document that replaces vLLM by a simulation. Pure.

A document without it starts vLLM, as before.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

MAX_FAULTS = 8
MAX_SPEED = 1000.0
MAX_STAGE_SECONDS = 3600.0
DEFAULT_HARDWARE = "h100-8b"

Coefficient = Annotated[float, Field(ge=0.0, le=3600.0, allow_inf_nan=False)]
StageSeconds = Annotated[float, Field(ge=0.0, le=MAX_STAGE_SECONDS, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True
    )


class FaultKind(StrEnum):
    """The faults of a simulated engine."""

    FREEZE = "Freeze"
    """EngineCore completes no more steps, while the API server still answers."""
    CRASH = "Crash"
    """The process ends by a signal."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The accelerator's memory is exhausted: EngineCore ends as vLLM's does."""
    FRAGMENTATION = "Fragmentation"
    """The allocator reserves more and more memory that it cannot use."""


class Fault(_Section):
    """One fault, a fixed time after the start."""

    kind: FaultKind = Field(strict=False)
    after_seconds: float = Field(
        default=0.0,
        ge=0.0,
        le=31_536_000.0,
        allow_inf_nan=False,
        description="Seconds of real time after the start, when the engine can run steps.",
    )


class StepCosts(_Section):
    """Seconds of a step: `t0 + max(w, g (prefill + decode)) + b sequences + c KV + q pairs`."""

    t0_seconds: Coefficient = Field(description="Each step.")
    w_seconds: Coefficient = Field(
        description="Reading the weights, which hides the time of few tokens."
    )
    g_seconds: Coefficient = Field(description="Each token in the step.")
    b_seconds: Coefficient = Field(description="Each decoding sequence.")
    c_seconds: Coefficient = Field(description="Each token in the KV cache.")
    q_seconds: Coefficient = Field(
        description="Each pair of a prefill token and a token before it."
    )
    request_seconds: Coefficient = Field(
        default=0.0, description="Each request that the step admits."
    )


class StartSeconds(_Section):
    """Time that each stage of a start takes, in seconds of real time."""

    weights: StageSeconds = 0.0
    load: StageSeconds = 0.0
    warm_up: StageSeconds = 0.0


class Simulation(_Section):
    """An engine that computes nothing: it needs no GPU, no weights and no vLLM."""

    hardware: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = Field(
        default=DEFAULT_HARDWARE,
        description="Name of the fitted step times to use, as in `fleetkeeper simulate --hardware`.",
    )
    costs: StepCosts | None = Field(
        default=None, description="Coefficients of one's own instead of those of the hardware."
    )
    kv_capacity_tokens: int | None = Field(
        default=None,
        ge=16,
        le=1_000_000_000,
        description="Tokens that the KV cache holds. If absent, those of the hardware.",
    )
    speed: float = Field(
        default=1.0,
        gt=0.0,
        le=MAX_SPEED,
        allow_inf_nan=False,
        description="Steps take their time divided by this.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Seed of the texts that requests get."
    )
    start_seconds: StartSeconds = StartSeconds()
    faults: tuple[Fault, ...] = Field(default=(), max_length=MAX_FAULTS)
