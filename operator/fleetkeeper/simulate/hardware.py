"""Step times and memory of accelerators: of the package, of one's own file, or of a running service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import yaml

from fleetkeeper.autoscale.capacity.step_time_model import StepModel, StepTime, learned
from fleetkeeper.autoscale.constants import MODEL_STEPS
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper_steps.hardware import Hardware, InvalidHardware, known_hardware, parse_fields

KNEE_TOKENS: Final = 161.0
"""Tokens of a step whose time reading the weights hides, w / g: the median of the package's fits."""


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
    return parse_fields(content, "custom")


def _names() -> str:
    return ", ".join(known_hardware())


def model_of_sums(windows: Iterable[Window]) -> StepModel:
    """Return the step-time model that the control loop learns from these windows, in their order."""
    model = StepModel()
    for window in windows:
        model = learned(model, window)
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
