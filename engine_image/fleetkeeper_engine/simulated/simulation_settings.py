"""Settings of a simulated engine: one JSON object in its environment, written by the supervisor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fleetkeeper_contract.version import VERSION

ENVIRONMENT = "FLEETKEEPER_SIMULATION"
VERSION_TEXT = f"simulated-{VERSION}"
"""Stands in the place of vLLM's version, and is the `system_fingerprint` of each answer."""


@dataclass(frozen=True, slots=True)
class TimedFault:
    """One fault: its kind, and when it begins after the API server first answers, in seconds."""

    kind: str
    after_s: float


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """A simulation with everything resolved: coefficients instead of the name of the hardware."""

    costs: tuple[float, ...]
    """t0, w, g, b, c, q and request, in seconds: the fields of `fleetkeeper_steps.costs.StepCosts`."""
    kv_capacity_tokens: int
    speed: float = 1.0
    seed: int = 0
    weights_s: float = 0.0
    load_s: float = 0.0
    warm_up_s: float = 0.0
    """Duration of each stage of the start."""
    faults: tuple[TimedFault, ...] = ()

    def to_json(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> SimulationSettings:
        """Return the settings of this process.

        Raises:
            ValueError: if the variable is absent or holds no such object.
        """
        text = environment.get(ENVIRONMENT)
        if not text:
            raise ValueError(
                f"{ENVIRONMENT} is not set: a simulated engine is started by fleetkeeper-engine with a "
                "document that has `simulation`"
            )
        values = json.loads(text)
        faults = tuple(TimedFault(**fault) for fault in values.pop("faults"))
        return cls(**{**values, "costs": tuple(values["costs"]), "faults": faults})
