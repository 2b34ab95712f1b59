"""The service and the load of a run of the demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.load.schedule import Shape


class EngineKind(StrEnum):
    """The engines of a run."""

    VLLM = "vllm"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A service and the load of its run."""

    title: str
    example: Path
    """The InferenceService that the demo applies."""
    name: str
    """The service's name."""
    engines: EngineKind
    surge: tuple[float, ...]
    """Multiples of the first load. The next one follows if the replicas stopped growing below `replicas`."""
    ramp_s: float
    """The load rises to the first multiple in this time; 0 for at once."""
    replicas: int
    """The surge lasts until this many replicas have been ready for a while."""
    shape: Shape = field(default_factory=Shape)


VLLM: Final = Scenario(
    title="Fleetkeeper: a load surge and three faults",
    example=REPOSITORY / "examples" / "tiny.yaml",
    name="tiny",
    engines=EngineKind.VLLM,
    surge=(4.0, 5.0, 6.25, 8.0),
    ramp_s=0.0,
    replicas=2,
)
SIMULATED: Final = Scenario(
    title="Fleetkeeper: a surge to twenty simulated H100 GPUs, and three faults",
    example=REPOSITORY / "examples" / "simulated.yaml",
    name="simulated",
    engines=EngineKind.SIMULATED,
    surge=(60.0, 75.0),
    ramp_s=300.0,
    replicas=20,
    # Long answers: twenty replicas then serve fewer requests a second than two cores can send.
    shape=Shape(prompt_tokens=(64, 512), output_tokens=(256, 768)),
)
SCENARIOS: Final = {scenario.engines: scenario for scenario in (VLLM, SIMULATED)}
