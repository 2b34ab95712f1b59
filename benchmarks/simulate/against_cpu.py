"""Compare the simulated engine with a real vLLM on this machine's CPU: fit one load, predict others.

    .venv/bin/python benchmarks/simulate/against_cpu.py

One engine runs with Fleetkeeper's scheduler and middleware. A closed loop measures its capacity. Then
three loads of the same kind are sent, Poisson arrivals at 0.5, 0.3 and 0.7 of that capacity. The sums of
the first one give the coefficients, by the code of the operator. The simulator plays all loads with
these coefficients: the same requests, arrival times, limits and KV cache. It needs root, for a share of
the CPUs with priority over other processes. The section in RESULTS.md is
replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "serving")]

from cpu_share import CpuShare  # noqa: E402 - the paths are set above
from errors_table import Pair, errors_table, goals_table  # noqa: E402
from real_engine import READ_EVERY_S, RealEngine  # noqa: E402
from replayed_load import Reading, Simulated, fitted, speeds  # noqa: E402
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper.autoscale.types import Limits  # noqa: E402
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals  # noqa: E402
from fleetkeeper_steps.hardware import Hardware  # noqa: E402
from tests.support.inside_engine import SETTINGS, InsideEngine, client  # noqa: E402

PAGE = HERE / "RESULTS.md"
HEADING = "vLLM on CPU: one load fitted, others predicted"
FITTED = "fitted"
LOADS = {FITTED: 0.5, "lower": 0.3, "higher": 0.7}
"""Loads as shares of the capacity, which is measured first."""
FULL = "full"
SHAPE = Shape(tiers={"standard": 1.0}, prompt_tokens=(30, 400), output_tokens=(20, 120))
LIMITS = Limits(8, 2048)
CLIENTS = 2 * LIMITS.sequences
FULL_SPAN_S = (10.0, 40.0)


@dataclass
class Round:
    """One round: the coefficients from its fitted load, every load measured and simulated."""

    hardware: Hardware
    pairs: dict[str, Pair]
    late_s: float = 0.0
    """The longest that the client sent a request after its time."""
    readings: list[Reading] = field(default_factory=list)
    """Those of the fitted load."""


def planned(rate_per_s: float, seconds: float, seed: int) -> tuple[Arrival, ...]:
    """Return the requests of a load."""
    return plan_arrivals([Phase("load", seconds, rate_per_s)], SHAPE, seed)


def seconds_of(load: str, seconds: float) -> float:
    """Return how long a load lasts: the fit refuses windows that it takes for disturbed, and needs enough."""
    return 1.5 * seconds if load == FITTED else seconds


def endless() -> tuple[Arrival, ...]:
    """Return more requests than a closed loop asks for."""
    return planned(50.0, 60.0, 7)


async def one_round(real: RealEngine, seed: int, capacity_per_s: float, seconds: float) -> Round:
    """Measure all loads, fit the first, and simulate all. Each seed gives other requests."""
    arrivals = {
        load: planned(share * capacity_per_s, seconds_of(load, seconds), 100 * seed + place)
        for place, (load, share) in enumerate(LOADS.items())
    }
    measured = {}
    for load, rows in arrivals.items():
        measured[load] = await real.open_loop(rows)
        print(f"  {load}: {measured[load].figures}", flush=True)
    hardware = fitted(measured[FITTED].readings, real.kv_capacity_tokens)
    measured[FULL] = await real.closed_loop(endless(), CLIENTS, FULL_SPAN_S)
    print(f"  {FULL}: {measured[FULL].figures}\n  {hardware}", flush=True)
    simulated = {
        load: Simulated(hardware, LIMITS).open_loop(rows) for load, rows in arrivals.items()
    }
    simulated[FULL] = Simulated(hardware, LIMITS).closed_loop(endless(), CLIENTS, FULL_SPAN_S)
    pairs = {
        load: Pair(row.figures, simulated[load], row.engine_ttft_s, row.engine_itl_s)
        for load, row in measured.items()
    }
    late_s = max(row.late_s for row in measured.values())
    return Round(hardware, pairs, late_s, measured[FITTED].readings)


async def measure(args: argparse.Namespace, directory: Path) -> None:
    """Start the engine, warm it up, and measure all rounds."""
    settings = replace(SETTINGS, max_sequences=LIMITS.sequences, max_tokens=LIMITS.tokens)
    with CpuShare(None) as share:
        # Other processes on the machine must not take time from the engine or the client.
        share.enter()
        engine = InsideEngine(directory, settings, layers=args.layers)
        try:
            async with client() as session:
                real = RealEngine(engine, session)
                await real.closed_loop(endless(), CLIENTS, (5.0, args.warm_seconds))
                full = await real.closed_loop(endless(), CLIENTS, FULL_SPAN_S)
                capacity = full.figures.requests_per_s
                print(f"capacity: {capacity:.2f} requests/s", flush=True)
                rounds: list[Round] = []
                for number in range(args.rounds):
                    print(f"round {number + 1}", flush=True)
                    rounds.append(await one_round(real, args.seed + number, capacity, args.seconds))
                    keep(rounds, capacity, args)
        finally:
            engine.stop()


def keep(rounds: Sequence[Round], capacity: float, args: argparse.Namespace) -> None:
    """Write what was measured so far: an interrupted run keeps its rounds."""
    text = render(rounds, capacity, args)
    rows: list[dict[str, Any]] = [asdict(found) for found in rounds]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.write:
        write_section(HEADING, text, PAGE)
    print(text, flush=True)


def render(rounds: Sequence[Round], capacity: float, args: argparse.Namespace) -> str:
    """Return the section of RESULTS.md."""
    loads = {load: [found.pairs[load] for found in rounds] for load in (*LOADS, FULL)}
    predicted = {load: pairs for load, pairs in loads.items() if load != FITTED}
    shares = ", ".join(f"{load} {share:g}" for load, share in LOADS.items())
    begin, end = FULL_SPAN_S
    return "\n\n".join(
        [
            "    .venv/bin/python benchmarks/simulate/against_cpu.py",
            (
                f"One vLLM for CPU with Fleetkeeper's scheduler and middleware, the tiny model with {args.layers} layers (longer "
                f"steps), at most {LIMITS.sequences} sequences and {LIMITS.tokens} tokens in a step, prefix caching off, no control loop. The engine, its "
                f"API server and the client share {os.cpu_count()} cores, with priority over other processes. Requests: standard, "
                f"{SHAPE.prompt_tokens[0]} to {SHAPE.prompt_tokens[1]} tokens in, {SHAPE.output_tokens[0]} to "
                f'{SHAPE.output_tokens[1]} out, streamed, Poisson arrivals for {args.seconds:.0f} s ("{FITTED}": {seconds_of(FITTED, args.seconds):.0f} s). Loads as shares of the capacity '
                f'({capacity:.2f} requests/s, a closed loop measured first): {shares}. "{FULL}" is a closed loop of {CLIENTS} clients, '
                f"{begin:.0f} to {end:.0f} s after its start."
            ),
            (
                f'The coefficients come from the step sums of "{FITTED}" alone, read every {READ_EVERY_S:.0f} s, by the code of '
                "`--fit-from-prometheus`. The simulator plays the same requests at the same times, with the same limits and "
                f"KV capacity. Medians of {len(rounds)} rounds, each with its own fit and other requests; the lowest and the highest in "
                "parentheses. Errors are those of the simulation, relative to the measurement. Queue wait, ITL and batch time are the "
                "engine's own sums; the client's TTFT contains its connection."
            ),
            goals_table(predicted),
            (
                f'Throughput below capacity follows the arrivals, so only "{FULL}" tests it: there it is the capacity. The errors of '
                f'"{FITTED}" are those of the fit on its own load.'
            ),
            errors_table(loads),
            (
                'Coefficients of each round. "Steps by window": the time of the steps in each window of the fitted load, relative '
                "to the fit. It shows how much the machine's speed changes within minutes."
            ),
            coefficients_table(rounds),
            measured_on(),
        ]
    )


def coefficients_table(rounds: Sequence[Round]) -> str:
    """Return the coefficients of each round."""
    rows = []
    for number, found in enumerate(rounds):
        costs, speed = found.hardware.costs, speeds(found.readings, found.hardware)
        rows.append(
            [
                str(number + 1),
                f"{1e3 * costs.t0_s:.2f}",
                f"{1e3 * costs.w_s:.2f}",
                f"{1e6 * costs.g_s:.1f}",
                f"{1e6 * costs.b_s:.0f}",
                f"{1e9 * costs.c_s:.0f}",
                f"{min(speed):.2f} to {max(speed):.2f}",
                f"{1e3 * found.late_s:.0f}",
            ]
        )
    headings = ["round", "t0, ms", "w, ms", "g, us per token", "b, us per sequence"]
    headings += ["c, ns per KV token", "steps by window", "client late at most, ms"]
    return markdown_table(headings, rows)


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a load")
    parser.add_argument("--seed", type=int, default=1, help="of the first round's requests")
    parser.add_argument("--layers", type=int, default=16, help="of the model")
    parser.add_argument("--warm-seconds", type=float, default=45.0)
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks/against_cpu.json"))
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    # A terminated measurement leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(args, Path(name)))


if __name__ == "__main__":
    main()
