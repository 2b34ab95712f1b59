"""Compare simulated closed loops with measured runs of vLLM on H100 and H200.

    .venv/bin/python scripts/validate_simulator.py DATA_DIR

DATA_DIR has calibration/silicon_vllm_h100_h200.csv. A row gives the time to first token (TTFT)
and the time per output token (TPOT) of one run at a constant concurrency. It does not say whether TTFT is
a median or a mean, so the table has both. Rows take part if the package has the same model, precision,
system and number of GPUs. Nothing is fitted here.

Settings of the runs that the rows do not have:
- 70B in FP8: lengths uniform in 0.8 to 1 of the stated ones, 10 requests per client, 8,192 tokens a
  step, as in the public scripts of InferenceMAX. The version of vLLM is not stated (October 2025).
- Qwen3-32B: vLLM 0.12.0, which takes 8,192 tokens a step on H100 by default. Equal lengths and four
  requests per client are assumptions.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_steps.hardware import Hardware, known_hardware
from naive_vllm import ClosedLoop, Outcome, simulate

GOAL: Final = 0.15
"""Largest median error of TPOT."""


@dataclass(frozen=True, slots=True)
class Family:
    """Rows of one model and system, and the settings of their runs."""

    hardware: str
    model: str
    precision: str
    system: str
    gpus: int
    shortest: float
    requests_per_client: int
    max_tokens: int = 8192


FAMILIES: Final = (
    Family("h100-32b", "Qwen/Qwen3-32B", "", "h100_sxm", 2, 1.0, 4),
    Family("h100-70b-fp8", "meta-llama/Llama-3.1-70B", "fp8", "h100_sxm", 2, 0.8, 10),
    Family("h200-70b-fp8", "meta-llama/Llama-3.1-70B", "fp8", "h200_sxm", 1, 0.8, 10),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run."""

    prompt: int
    generated: int
    concurrency: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured run, its simulation by `fleetkeeper.simulate`, and that by the naive engine."""

    measured: Measured
    simulated: Outcome
    naive: Outcome

    @property
    def tpot_error(self) -> float:
        """The relative error of TPOT, with its sign."""
        return self.simulated.tpot_s / self.measured.tpot_s - 1.0

    @property
    def naive_tpot_error(self) -> float:
        """The relative error of the naive engine's TPOT, with its sign."""
        return self.naive.tpot_s / self.measured.tpot_s - 1.0

    @property
    def ttft_error(self) -> float:
        """The relative error of the median TTFT, with its sign."""
        return self.simulated.ttft_s / self.measured.ttft_s - 1.0

    @property
    def mean_ttft_error(self) -> float:
        """The relative error of the mean TTFT, with its sign."""
        return self.simulated.mean_ttft_s / self.measured.ttft_s - 1.0

    @property
    def fills_cache(self) -> bool:
        """Whether the KV cache was full: an estimate of its capacity then decides."""
        naive = self.naive
        return bool(self.simulated.preemptions or naive.preemptions or naive.waited_steps)


def main() -> None:
    """Print a table per family, and exit with status 1 if the median error of TPOT is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data_dir", type=Path, metavar="DATA_DIR")
    parser.add_argument(
        "--kernel-ratio", type=float, help="factor on kernel times, instead of the package's"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="token budget of a step, instead of the assumed one"
    )
    arguments = parser.parse_args()
    path = arguments.data_dir / "calibration" / "silicon_vllm_h100_h200.csv"
    if not path.is_file():
        sys.exit(f"{path} does not exist. Give the directory that contains calibration/.")
    rows, skipped = measured_rows(path)
    everything: list[Comparison] = []
    for family in FAMILIES:
        hardware = known_hardware()[family.hardware]
        if arguments.kernel_ratio is not None:
            hardware = replace(hardware, kernel_ratio=arguments.kernel_ratio)
        max_tokens = arguments.max_tokens or family.max_tokens
        settings = replace(family, max_tokens=max_tokens)
        found = [compare(hardware, settings, row) for row in rows[family]]
        print_family(family, hardware, found)
        everything += found
    print(f"\nall: {summary(everything)}")
    print(f"{sum(skipped.values())} rows have no fit of the same model, precision and GPUs:")
    for reason in sorted(skipped):
        print(f"  {skipped[reason]:4} {reason}")
    if median(abs(item.tpot_error) for item in everything) > GOAL:
        sys.exit(f"The median error of TPOT is above {GOAL:.0%}.")


def measured_rows(path: Path) -> tuple[dict[Family, list[Measured]], dict[str, int]]:
    """Return the rows by family, and the number of rows that belong to none."""
    rows: dict[Family, list[Measured]] = defaultdict(list)
    skipped: dict[str, int] = defaultdict(int)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            gpus = int(float(row["tp_size"]))
            key = (row["model_path"], row["precision"], row["system"], gpus)
            family = next((f for f in FAMILIES if _key(f) == key), None)
            if family is None:
                skipped[f"{key[0]} {key[1] or 'unstated precision'} {key[2]} x{gpus}"] += 1
                continue
            rows[family].append(
                Measured(
                    prompt=int(row["isl"]),
                    generated=int(row["osl"]),
                    concurrency=int(float(row["batch_size"])),
                    ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
                    tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
                )
            )
    for found in rows.values():
        found.sort(key=lambda row: (row.prompt, row.generated, row.concurrency))
    return rows, skipped


def _key(family: Family) -> tuple[str, str, str, int]:
    return family.model, family.precision, family.system, family.gpus


def compare(hardware: Hardware, family: Family, row: Measured) -> Comparison:
    """Return a row with its simulation."""
    load = ClosedLoop(
        concurrency=row.concurrency,
        prompt=row.prompt,
        generated=row.generated,
        requests=row.concurrency * family.requests_per_client,
        shortest=family.shortest,
        max_tokens=family.max_tokens,
    )
    return Comparison(row, simulate_product(hardware, load), simulate(hardware, load))


def simulate_product(hardware: Hardware, load: ClosedLoop) -> Outcome:
    """Return the outcome of the same closed loop on the engine of `fleetkeeper.simulate`."""
    spec = EngineSpec(
        hardware.costs,
        kv_capacity_tokens=hardware.kv_capacity_tokens,
        max_sequences=load.concurrency,
        max_tokens=load.max_tokens,
        queue_limits=None,
    )
    engine = Engine(spec, hardware.name, started=0.0)
    lengths = load.lengths()[::-1]
    ended: list[Request] = []
    for _ in range(min(load.concurrency, load.requests)):
        engine.arrive(Request(0.0, 1, *lengths.pop()))
    while not engine.is_idle:
        engine.advance(math.nextafter(engine.time, math.inf))  # one step
        finished = engine.take_ended()
        ended += finished
        for _ in finished[: len(lengths)]:
            engine.arrive(Request(engine.time, 1, *lengths.pop()))
    preemptions = engine.sample(engine.time).counters.preemptions
    return Outcome.of(
        [request.ttft_s for request in ended],
        [request.tpot_s for request in ended],
        int(preemptions),
    )


def print_family(family: Family, hardware: Hardware, found: Sequence[Comparison]) -> None:
    """Print one line per row, and a summary. A row with a full KV cache is marked `kv`."""
    print(f"\n{family.hardware}: {family.model} on {family.gpus} x {family.system}")
    print(
        f"kernel ratio {hardware.kernel_ratio}, KV cache {hardware.kv_capacity_tokens:.0f} tokens"
    )
    print(
        f"{'in':>5}{'out':>6}{'conc':>5} |{'TPOT ms':>8}{'simulated':>16}{'naive':>15}"
        f" |{'TTFT ms':>8}{'median':>15}{'mean':>15}"
    )
    for item in found:
        row, simulated = item.measured, item.simulated
        mark = f" kv, {simulated.preemptions} preempted" if item.fills_cache else ""
        print(
            f"{row.prompt:>5}{row.generated:>6}{row.concurrency:>5} |{1e3 * row.tpot_s:>8.1f}"
            f"{1e3 * simulated.tpot_s:>9.1f}{item.tpot_error:>+7.0%}"
            f"{1e3 * item.naive.tpot_s:>8.1f}{item.naive_tpot_error:>+7.0%}"
            f" |{1e3 * row.ttft_s:>8.0f}{1e3 * simulated.ttft_s:>8.0f}{item.ttft_error:>+7.0%}"
            f"{1e3 * simulated.mean_ttft_s:>8.0f}{item.mean_ttft_error:>+7.0%}{mark}",
            flush=True,
        )
    print(summary(found))


def summary(found: Sequence[Comparison]) -> str:
    """Return the median errors of all rows, and of those with room in the KV cache."""
    fitting = [item for item in found if not item.fills_cache]
    return "; ".join(
        f"{len(part)} rows {label}: TPOT {median(abs(i.tpot_error) for i in part):.1%} "
        f"(largest {max(abs(i.tpot_error) for i in part):.0%}), "
        f"naive {median(abs(i.naive_tpot_error) for i in part):.1%}, "
        f"TTFT {median(abs(i.ttft_error) for i in part):.0%}, "
        f"as a mean {median(abs(i.mean_ttft_error) for i in part):.0%}"
        for label, part in (("in all", found), ("with room in the KV cache", fitting))
        if part
    )


if __name__ == "__main__":
    main()
