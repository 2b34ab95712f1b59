"""The simulation that engines with a simulated profile run instead of vLLM.

The engine checks the same bounds: `fleetkeeper_engine.simulation`, compared by a test.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from fleetkeeper.api.base import Section

HARDWARE: Final = (
    "a100-32b",
    "a100-70b",
    "a100-8b",
    "h100-32b",
    "h100-70b",
    "h100-70b-fp8",
    "h100-8b",
    "h200-32b",
    "h200-70b",
    "h200-70b-fp8",
    "h200-8b",
)
"""The names of `fleetkeeper simulate --hardware`."""


def _known(name: str) -> str:
    if name not in HARDWARE:
        raise ValueError(f"{name!r} is unknown; use {', '.join(HARDWARE)}")
    return name


Coefficient = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
StageSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
HardwareName = Annotated[str, Field(max_length=63), AfterValidator(_known)]


class FaultKind(StrEnum):
    """The ways in which a simulated engine fails."""

    FREEZE = "Freeze"
    CRASH = "Crash"
    OUT_OF_MEMORY = "OutOfMemory"
    FRAGMENTATION = "Fragmentation"


class Fault(Section):
    """A fault of every replica, once for each start of its engine."""

    kind: FaultKind = Field(
        description="Freeze: the engine completes no more steps. Crash: it ends by a signal. OutOfMemory: it ends as vLLM does without accelerator memory. Fragmentation: memory that it reserves and cannot use grows."
    )
    after_seconds: float = Field(
        0.0,
        ge=0,
        le=31_536_000,
        allow_inf_nan=False,
        description="Seconds after the engine is ready.",
    )


class StepCosts(Section):
    """The coefficients of a step's time, as in the reference of `fleetkeeper simulate`."""

    t0_seconds: Coefficient = Field(description="Seconds for each step.")
    w_seconds: Coefficient = Field(
        description="Seconds to read the weights, which hides the time of few tokens."
    )
    g_seconds: Coefficient = Field(description="Seconds for each token in the step.")
    b_seconds: Coefficient = Field(description="Seconds for each decoding sequence.")
    c_seconds: Coefficient = Field(description="Seconds for each token in the KV cache.")
    q_seconds: Coefficient = Field(
        description="Seconds for each pair of a prefill token and a token before it."
    )
    request_seconds: Coefficient = Field(
        0.0, description="Seconds for each request that the step admits."
    )


class StartSeconds(Section):
    """The time that each stage of a start takes."""

    weights: StageSeconds = Field(0.0, description="Seconds until the weights are loaded.")
    load: StageSeconds = Field(0.0, description="Seconds from then until the API server answers.")
    warm_up: StageSeconds = Field(0.0, description="Seconds of the first request.")


class Simulation(Section):
    """The speed, memory, start and faults of simulated engines."""

    hardware: HardwareName = Field(
        "h100-8b",
        description=f"Model and accelerator with these step times and this KV cache: {', '.join(HARDWARE)}.",
    )
    costs: StepCosts | None = Field(
        None, description="Own coefficients of a step's time. Absent: those of the hardware."
    )
    kv_capacity_tokens: int | None = Field(
        None,
        ge=16,
        le=1_000_000_000,
        description="Tokens that the KV cache holds. Absent: those of the hardware.",
    )
    speed: float = Field(
        1.0,
        ge=0.001,
        le=1000,
        allow_inf_nan=False,
        description="Steps take their time divided by this.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of the texts of answers.")
    start_seconds: StartSeconds = Field(
        default_factory=StartSeconds, description="Time of each stage of a start."
    )
    faults: tuple[Fault, ...] = Field(
        (), max_length=8, description="Faults of every engine with the profile."
    )
