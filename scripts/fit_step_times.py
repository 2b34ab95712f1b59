"""Fit the simulator's step-time model to measured kernel times, and write its package data.

    .venv/bin/python scripts/fit_step_times.py DATA_DIR

DATA_DIR has calibration/steptime_aic.csv. The fit is non-negative least squares on the relative error:

    step = t0 + max(w, g (P + B)) + b B + c KV + q pairs

with w = g x knee, and the knee (in tokens) found by search. Mixed rows of FP8 are left out: they add
the time to read the weights twice. Their g and q come from the rows with prefill alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleetkeeper_steps.hardware import (
    KERNEL_RATIO,
    REQUEST_OVERHEAD_S,
    SEQUENCE_OVERHEAD_S,
    STEP_OVERHEAD_S,
)

Array = npt.NDArray[np.float64]
OUTPUT: Final = Path(__file__).parents[1] / "contract/fleetkeeper_steps/hardware.json"
KINDS: Final = ("decode", "prefill", "mixed")
MAX_MEDIAN_ERROR: Final = 0.05
COLD_START_S: Final = {"8b": 75.0, "32b": 116.0, "70b": 180.0, "70b-fp8": 180.0}
"""Medians with image and weights cached. 8B and 70B are given; 32B is between them by its size."""
WEIGHTS: Final = {
    "8b": "16 GB in bf16",
    "32b": "65 GB in bf16",
    "70b": "141 GB in bf16",
    "70b-fp8": "71 GB in FP8",
}
KV_CAPACITY_TOKENS: Final = {
    "a100-8b": 400_000,
    "h100-8b": 400_000,
    "h200-8b": 800_000,
    "a100-32b": 270_000,
    "h100-32b": 270_000,
    "h200-32b": 210_000,
    "a100-70b": 420_000,
    "h100-70b": 420_000,
    "h200-70b": 320_000,
    "h100-70b-fp8": 210_000,
    "h200-70b-fp8": 330_000,
}
"""Estimates. Those of FP8: 0.83 of (0.9 of the memory - weights) / bytes of a token, as the others are.

A token has 328 kB in bf16. Measured runs queue on two H100 at 250,000 tokens, which an FP8 cache would
hold (420,000), and do not on one H200, which a bf16 cache would not hold (165,000).
"""
KV_CACHE: Final = {"h100-70b-fp8": "bf16", "h200-70b-fp8": "FP8"}


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one model and system: kind, prefill tokens, sequences, KV tokens, pairs, milliseconds."""

    kinds: npt.NDArray[np.str_]
    prefill: Array
    sequences: Array
    kv: Array
    pairs: Array
    time_ms: Array

    def features(self, knee: float) -> Array:
        """Return the rows (1, max(knee, P + B), B, KV, pairs)."""
        tokens = np.maximum(knee, self.prefill + self.sequences)
        return np.stack([np.ones_like(tokens), tokens, self.sequences, self.kv, self.pairs], axis=1)


@dataclass(frozen=True, slots=True)
class StepFit:
    """Coefficients in milliseconds (t0, g, b, c, q), the knee in tokens, and the error of each step."""

    coefficients: Array
    knee: float
    errors: Array


def main() -> None:
    """Fit every model and system, print the errors, and write the package data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data_dir", type=Path, metavar="DATA_DIR")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    path = arguments.data_dir / "calibration" / "steptime_aic.csv"
    if not path.is_file():
        sys.exit(f"{path} does not exist. Give the directory that contains calibration/.")
    entries, bad = {}, []
    print("median / p90 of the relative error, in %")
    print(f"{'hardware':14}{'steps':>6}{'all':>14}" + "".join(f"{kind:>14}" for kind in KINDS))
    for name, first, steps in sorted(_groups(path), key=lambda group: group[0]):
        fit = fit_steps(steps)
        print(_row(name, steps, fit))
        entries[name] = _entry(name, first, steps, fit)
        if np.median(fit.errors) > MAX_MEDIAN_ERROR:
            bad.append(name)
    if bad:
        sys.exit(f"The median error of {', '.join(bad)} is above {MAX_MEDIAN_ERROR:.0%}.")
    arguments.output.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    print(f"{arguments.output}: {len(entries)} entries")


def _groups(path: Path) -> Iterator[tuple[str, dict[str, str], Steps]]:
    """Yield the name, the first row and the steps of each model, precision and system."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["precision"] != "fp8" or row["kind"] != "mixed":
                groups[_name(row)].append(row)
    for name, rows in groups.items():
        yield name, rows[0], _steps(rows)


def _name(row: dict[str, str]) -> str:
    size = next(size for size in ("8b", "32b", "70b") if f"-{size}" in row["model"].lower())
    precision = "-fp8" if row["precision"] == "fp8" else ""
    return f"{row['system'].partition('_')[0]}-{size}{precision}"


def _steps(rows: list[dict[str, str]]) -> Steps:
    """Return the rows as arrays.

    Prefill chunks of a mixed step are averages over the prompt: a chunk of 256 of 4,096 tokens has
    256 x 2,048 pairs, and one of 8,192 tokens is two such prompts.
    """
    context = np.array([float(row["context_or_isl"]) for row in rows])
    prefill = np.array([float(row["prefill_chunk"]) for row in rows])
    kinds = np.array([row["kind"] for row in rows])
    sequences = np.where(kinds == "prefill", 0.0, [float(row["batch"]) for row in rows])
    return Steps(
        kinds=kinds,
        prefill=prefill,
        sequences=sequences,
        kv=sequences * context + prefill,
        pairs=prefill * context / 2,
        time_ms=np.array([float(row["latency_ms"]) for row in rows]),
    )


def fit_steps(steps: Steps) -> StepFit:
    """Return the fit with the knee of the smallest error: a coarse grid, then a fine one around it."""
    coarse = np.geomspace(8.0, 2048.0, 49)
    best = min(coarse, key=lambda knee: _fit_at(steps, knee)[0])
    step = coarse[1] / coarse[0]
    fine = np.geomspace(best / step, best * step, 49)
    knee = float(min(fine, key=lambda knee: _fit_at(steps, knee)[0]))
    coefficients = _fit_at(steps, knee)[1]
    return StepFit(
        coefficients, knee, np.abs(steps.features(knee) @ coefficients / steps.time_ms - 1.0)
    )


def _fit_at(steps: Steps, knee: float) -> tuple[float, Array]:
    return non_negative_least_squares(
        steps.features(knee) / steps.time_ms[:, None], np.ones_like(steps.time_ms)
    )


def non_negative_least_squares(a: Array, b: Array) -> tuple[float, Array]:
    """Return the smallest sum of squares of a x - b with x >= 0, and x.

    The solution is the best non-negative one among the unconstrained solutions on subsets of columns.
    With five columns there are 31 subsets, so no active-set method is needed.
    """
    scale = np.sqrt((a * a).sum(axis=0))
    best, solution = float((b * b).sum()), np.zeros(a.shape[1])
    columns = range(a.shape[1])
    for subset in itertools.chain.from_iterable(
        itertools.combinations(columns, size) for size in range(1, a.shape[1] + 1)
    ):
        chosen = list(subset)
        x = np.linalg.lstsq(a[:, chosen] / scale[chosen], b, rcond=None)[0] / scale[chosen]
        if (x < 0.0).any():
            continue
        error = float(((a[:, chosen] @ x - b) ** 2).sum())
        if error < best:
            best, solution = error, np.zeros(a.shape[1])
            solution[chosen] = x
    return best, solution


def _row(name: str, steps: Steps, fit: StepFit) -> str:
    cells = [f"{name:14}{len(fit.errors):>6}{_error(fit.errors)}"]
    for kind in KINDS:
        chosen = fit.errors[steps.kinds == kind]
        cells.append(_error(chosen) if len(chosen) else f"{'-':>14}")
    return "".join(cells)


def _error(errors: Array) -> str:
    text = f"{100 * np.median(errors):.1f} / {100 * np.quantile(errors, 0.9):.1f}"
    return f"{text:>14}"


def _entry(name: str, row: dict[str, str], steps: Steps, fit: StepFit) -> dict[str, Any]:
    t0, g, b, c, q = (float(value) / 1e3 for value in fit.coefficients)
    size = name.partition("-")[2]
    kinds = [kind for kind in KINDS if kind in steps.kinds]
    entry = {
        "model": row["model"],
        "system": row["system"],
        "gpus": int(row["tp"]),
        "precision": row["precision"],
        "t0_s": t0,
        "w_s": g * fit.knee,
        "g_s": g,
        "b_s": b,
        "c_s": c,
        "q_s": q,
        "kernel_ratio": KERNEL_RATIO,
        "step_overhead_s": STEP_OVERHEAD_S,
        "sequence_overhead_s": SEQUENCE_OVERHEAD_S,
        "request_overhead_s": REQUEST_OVERHEAD_S,
        "cold_start_s": COLD_START_S[size],
        "kv_capacity_tokens": KV_CAPACITY_TOKENS[name],
        "kv_cache": f"{KV_CACHE.get(name, 'bf16')}, capacity estimated",
        "weights": WEIGHTS[size],
        "median_error_ratio": float(np.median(fit.errors)),
        "source": (
            f"{len(fit.errors)} kernel times ({', '.join(kinds)}) of aiconfigurator 0.12, "
            f"vLLM {row['vllm_db']}"
        ),
    }
    return {key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in entry.items()}


if __name__ == "__main__":
    main()
