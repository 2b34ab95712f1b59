"""Step times and memory of accelerators: fits in the package, one's own file, or a running service.

    step = kernel_ratio (t0 + max(w, g (P + B)) + b B + c KV + q pairs)
           + step_overhead + sequence_overhead B + request_overhead R

P: prefill tokens in the step, B: decoding sequences, KV: resident KV tokens, pairs: sum over the
prefill chunks of chunk x (start + chunk / 2), R: requests that the step admits. The first line is the
time of the kernels, the second that of vLLM around them. `scripts/fit_step_times.py` writes the fits
of the package, and `scripts/validate_simulator.py` compares them with measured runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import yaml

from fleetkeeper.autoscale.capacity.step_time_model import StepModel, StepTime, learned
from fleetkeeper.autoscale.constants import MODEL_STEPS
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.simulate.engine import StepCosts

KERNEL_RATIO: Final = 1.1
"""Measured time of a step over the time of its kernels: the lower end of 1.1 to 1.15 (70B in FP8)."""
STEP_OVERHEAD_S: Final = 126e-6
SEQUENCE_OVERHEAD_S: Final = 4.4e-6
REQUEST_OVERHEAD_S: Final = 15.6e-3
"""Time around the kernels, from measured runs of vLLM (70B in FP8, 1,024 tokens in and out)."""
KNEE_TOKENS: Final = 161.0
"""Tokens of a step whose time reading the weights hides, w / g: the median of the package's fits."""

POSITIVE: Final = frozenset({"gpus", "kernel_ratio", "kv_capacity_tokens"})


class InvalidHardware(ValueError):
    """An unknown name, or a description with a wrong field. The message names the field."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on one replica's accelerators. Times in seconds; source: the data of the fit.

    `t0_s`: time of every step. `w_s`: time to read the weights, which hides that of few tokens. `g_s`: per
    token in the step. `b_s`: per decoding sequence. `c_s`: per resident KV token. `q_s`: per pair of a
    prefill token and a token before it. `kv_capacity_tokens`: tokens that the KV cache holds.
    `step_overhead_s`, `sequence_overhead_s` and `request_overhead_s`: time around the kernels per step, per
    decoding sequence in it, and per request that it admits. `cold_start_s`: from the creation of a pod to
    a loaded model, image and weights cached (a median). `kernel_ratio`: factor on the kernels' time.
    `median_error_ratio`: of the fit, over the steps that it was fitted to.
    """

    name: str
    model: str
    system: str
    gpus: int
    precision: str
    t0_s: float
    w_s: float
    g_s: float
    b_s: float
    c_s: float
    q_s: float
    kv_capacity_tokens: float
    step_overhead_s: float = STEP_OVERHEAD_S
    sequence_overhead_s: float = SEQUENCE_OVERHEAD_S
    request_overhead_s: float = REQUEST_OVERHEAD_S
    cold_start_s: float = 75.0
    kernel_ratio: float = KERNEL_RATIO
    median_error_ratio: float = 0.0
    source: str = ""
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
    return MappingProxyType({name: _parse_fields(entries[name], name) for name in sorted(entries)})


def parse_hardware(text: str) -> Hardware:
    """Return the hardware of a name in the package, or of a file's content (YAML or JSON).

    Raise `InvalidHardware` if the name is unknown, or if a field is unknown, missing or wrong.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidHardware(f"The hardware file is neither JSON nor YAML: {error}") from error
    if isinstance(content, str):
        try:
            return known_hardware()[content]
        except KeyError:
            raise InvalidHardware(
                f"Hardware {content!r} is unknown. Use {_names()}, or a file with coefficients."
            ) from None
    if not isinstance(content, dict):
        raise InvalidHardware(
            "The hardware file must be a mapping of fields (t0_s, w_s, ...). "
            f"Names of the package: {_names()}."
        )
    return _parse_fields(content, "custom")


def _names() -> str:
    return ", ".join(known_hardware())


_TEXTS: Final = {field.name for field in fields(Hardware) if field.type == "str"}
_DEFAULTS: Final = {"model": "unknown", "system": "unknown", "gpus": 1, "precision": "unknown"}


def _parse_fields(content: Mapping[str, Any], name: str) -> Hardware:
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


def model_of_sums(windows: Iterable[Window]) -> StepModel:
    """Return the step-time model that the control loop learns from these windows, in their order."""
    model = StepModel()
    for window in windows:
        model = learned(model, window, window.end)
    return model


def fit_of_sums(
    model: StepModel,
    *,
    kv_capacity_tokens: float,
    name: str = "measured",
    cold_start_s: float = 75.0,
) -> Hardware:
    """Return the hardware that a running service's step times describe.

    The measured times contain all overheads, so those per step and per sequence are 0. What a step with
    prefill takes beyond its tokens is the overhead of the request that starts in it. The sums have no
    product with pairs, so `q_s` is 0 and `g_s` contains the mean cost of prefill attention. Raise
    `InvalidHardware` if too few steps were seen.
    """
    for kind, steps, known in (
        ("decode-only", model.decode.steps, model.knows_decode),
        ("prefill", model.prefill.steps, model.knows_prefill),
    ):
        if not known:
            raise InvalidHardware(
                f"Hardware {name!r}: {steps:.0f} {kind} steps were measured, at least {MODEL_STEPS} "
                "are needed. Use a longer period, or a period with more load."
            )
    times = _with_knee(model.step_time)
    return Hardware(
        name=name,
        model="unknown",
        system="unknown",
        gpus=1,
        precision="unknown",
        t0_s=times.t0_s,
        w_s=times.w_s,
        g_s=times.g_s,
        b_s=times.b_s,
        c_s=times.c_s,
        q_s=0.0,
        kv_capacity_tokens=kv_capacity_tokens,
        step_overhead_s=0.0,
        sequence_overhead_s=0.0,
        request_overhead_s=times.p_s,
        cold_start_s=cold_start_s,
        kernel_ratio=1.0,
        source=f"{model.decode.steps + model.prefill.steps:.0f} measured steps of a running service",
    )


def _with_knee(times: StepTime) -> StepTime:
    """Return the same times with a knee, if the request that starts hides it from the fit.

    The fit then has w = 0 and would add `g_s` to the decoding sequences, whose cost is in `b_s` already.
    Part of t0 becomes w, and p grows by it, so that steps with prefill take as long as before.
    """
    if times.p_s <= 0.0:
        return times
    hidden_s = min(times.t0_s, KNEE_TOKENS * times.g_s)
    return replace(times, t0_s=times.t0_s - hidden_s, w_s=hidden_s, p_s=times.p_s + hidden_s)
