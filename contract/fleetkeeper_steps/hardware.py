"""Step times and memory of accelerators: the fits in the package, and fields of one's own.

    step = kernel_ratio (t0 + max(w, g (P + B)) + b B + c KV + q pairs)
           + step_overhead + sequence_overhead B + request_overhead R

P: prefill tokens in the step, B: decoding sequences, KV: resident KV tokens, pairs: sum over the
prefill chunks of chunk x (start + chunk / 2), R: requests that the step admits. The first line is the
time of the kernels, the second that of vLLM around them. `benchmarks/simulate/RESULTS.md` says how the
fits of the package were made, and compares them with measured runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from fleetkeeper_steps.costs import StepCosts

KERNEL_RATIO: Final = 1.1
"""Measured time of a step over the time of its kernels: the lower end of 1.1 to 1.15 (70B in FP8)."""
STEP_OVERHEAD_S: Final = 126e-6
SEQUENCE_OVERHEAD_S: Final = 4.4e-6
REQUEST_OVERHEAD_S: Final = 15.6e-3
"""Time around the kernels, from measured runs of vLLM (70B in FP8, 1,024 tokens in and out). A request of
the 8B fits takes 5.5 ms, from 25 windows on an H200 (`benchmarks/gpu/RESULTS.md`)."""

POSITIVE: Final = frozenset({"gpus", "kernel_ratio", "kv_capacity_tokens"})


class InvalidHardware(ValueError):
    """An unknown name, or a description with a wrong field. The message names the field."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on one replica's accelerators. Times are in seconds."""

    name: str
    model: str
    system: str
    gpus: int
    precision: str
    t0_s: float
    """Time of every step."""
    w_s: float
    """Time to read the weights, which hides the time of few tokens."""
    g_s: float
    """Time per token in the step."""
    b_s: float
    """Time per decoding sequence."""
    c_s: float
    """Time per resident KV token."""
    q_s: float
    """Time per pair of a prefill token and a token before it."""
    kv_capacity_tokens: float
    """Tokens that the KV cache holds."""
    step_overhead_s: float = STEP_OVERHEAD_S
    """Time around the kernels per step."""
    sequence_overhead_s: float = SEQUENCE_OVERHEAD_S
    """Time around the kernels per decoding sequence in a step."""
    request_overhead_s: float = REQUEST_OVERHEAD_S
    """Time around the kernels per request that a step admits."""
    cold_start_s: float = 75.0
    """Median time from the creation of a pod to a loaded model, with image and weights cached."""
    kernel_ratio: float = KERNEL_RATIO
    """Factor on the kernels' time."""
    median_error_ratio: float = 0.0
    """Median error of the fit, over the steps that it was fitted to."""
    source: str = ""
    """The data of the fit."""
    weights: str = ""
    kv_cache: str = ""

    def kernel_time_s(
        self, prefill_tokens: float, sequences: float, kv_tokens: float, pairs: float
    ) -> float:
        """Return the time of a step's kernels in seconds, without any overhead."""
        return (
            self.t0_s
            + max(self.w_s, self.g_s * (prefill_tokens + sequences))
            + self.b_s * sequences
            + self.c_s * kv_tokens
            + self.q_s * pairs
        )

    def step_time_s(
        self,
        prefill_tokens: float,
        sequences: float,
        kv_tokens: float,
        pairs: float = 0.0,
        admitted: float = 0.0,
    ) -> float:
        """Return the time of a step in seconds: kernels and overheads.

        Example: 8B on one H100 (t0 2.5 ms, w 4.1 ms), one sequence without prefill:
        1.1 x 6.6 + 0.13 = 7.4 ms.
        """
        kernels_s = self.kernel_time_s(prefill_tokens, sequences, kv_tokens, pairs)
        return (
            self.kernel_ratio * kernels_s
            + self.step_overhead_s
            + self.sequence_overhead_s * sequences
            + self.request_overhead_s * admitted
        )

    @property
    def costs(self) -> StepCosts:
        """The coefficients that the simulated engine uses, with the overheads in them."""
        ratio = self.kernel_ratio
        return StepCosts(
            t0_s=ratio * self.t0_s + self.step_overhead_s,
            w_s=ratio * self.w_s,
            g_s=ratio * self.g_s,
            b_s=ratio * self.b_s + self.sequence_overhead_s,
            c_s=ratio * self.c_s,
            q_s=ratio * self.q_s,
            request_s=self.request_overhead_s,
        )


def floor_s(hardware: Hardware) -> float:
    """Return the time of the shortest step: one sequence, no prefill, an empty KV cache."""
    return hardware.step_time_s(0.0, 1.0, 0.0)


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Return the fits of the package by name, sorted."""
    text = resources.files(__package__).joinpath("hardware.json").read_text(encoding="utf-8")
    entries = json.loads(text)
    return MappingProxyType({name: parse_fields(entries[name], name) for name in sorted(entries)})


_TEXTS: Final = {field.name for field in fields(Hardware) if field.type == "str"}
_DEFAULTS: Final = {"model": "unknown", "system": "unknown", "gpus": 1, "precision": "unknown"}


def parse_fields(content: Mapping[str, Any], name: str) -> Hardware:
    """Return the hardware of a mapping. `name`: its name if the mapping has none."""
    given = {"name": name, **_DEFAULTS, **content}
    name = str(given["name"])
    names = [field.name for field in fields(Hardware)]
    unknown = sorted(str(key) for key in given if key not in names)
    if unknown:
        raise InvalidHardware(
            f"Hardware {name!r}: field {unknown[0]!r} is unknown. Fields: {', '.join(names)}."
        )
    needed = [field.name for field in fields(Hardware) if field.default is MISSING]
    missing = [field for field in needed if field not in given]
    if missing:
        raise InvalidHardware(f"Hardware {name!r}: add the field {', '.join(missing)}.")
    values: dict[str, Any] = {key: _value(name, key, value) for key, value in given.items()}
    hardware = Hardware(**values)
    if floor_s(hardware) <= 0.0:
        raise InvalidHardware(f"Hardware {name!r}: a step takes no time. Set t0_s or w_s above 0.")
    return hardware


def _value(name: str, key: str, value: object) -> str | int | float:
    """Return a field's value, or raise `InvalidHardware`."""
    wrong = f"Hardware {name!r}: {key} is {value!r}. It must be"
    if key in _TEXTS:
        if isinstance(value, str):
            return value
        raise InvalidHardware(f"{wrong} a text.")
    lowest = "above 0" if key in POSITIVE else "of at least 0"
    number = _number(value)
    if number is None or number < 0 or (key in POSITIVE and number == 0):
        raise InvalidHardware(f"{wrong} a number {lowest}.")
    if key != "gpus":
        return number
    if not number.is_integer():
        raise InvalidHardware(f"{wrong} a whole number.")
    return int(number)


def _number(value: object) -> float | None:
    """Return a finite number, else None. YAML reads 2e-5 as a text: it wants 2.0e-5."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
