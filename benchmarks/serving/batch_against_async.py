"""Static batches, plain asynchronous requests, and Fleetkeeper: at three loads, on one machine.

    .venv/bin/python benchmarks/serving/batch_against_async.py

Three modes answer the same planned requests (realtime and standard, 7:3):

- static: the client collects requests and sends one batch after the other to stock vLLM. Of several
  batch sizes it uses the one with the highest throughput on this machine.
- async: the client sends every request at its time to stock vLLM.
- fleetkeeper: the client sends every request at its time, with its tier, to vLLM with Fleetkeeper:
  tiers and queue limits in the engine, live limits and load shedding by the control loop.

A load is a share of the capacity of stock vLLM, which is measured just before. Ratios are computed
within a round, and the table shows medians over the rounds. The section in RESULTS.md is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cpu_share import CpuShare
from live_control import LiveControl
from mode_figures import Answer, Cell, Rounds, cell_of, mode_table, tier_table
from results_page import markdown_table, measured_on, write_section
from send_modes import (
    StaticBatches,
    new_client,
    saturated_per_s,
    send_each,
)
from stock_and_ours import (
    MAX_SEQUENCES,
    MODEL,
    Pair,
    control_settings,
    running_pair,
)

from fleetkeeper_local.load.client import CompletionClient
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals

HEADING = "Static batches, asynchronous requests and Fleetkeeper"
STATIC, ASYNC, OURS = "static", "async", "fleetkeeper"
MODES = (STATIC, ASYNC, OURS)
SHAPE = Shape(tiers={"realtime": 0.7, "standard": 0.3})
LOADS = {"0.5": 0.5, "0.9": 0.9, "1.5": 1.5}
"""Loads as shares of the capacity of stock vLLM, measured just before."""
SIZES = (8, 16, 32, 64)
WINDOW_S = 0.25
"""How long a static batch waits to fill."""
DEADLINE_S = 10.0
"""A client hangs up this long after it should have sent its request."""
WARM_S = 5.0
CAPACITY_CLIENTS = 96
"""More than the sequence limit, so that a free place is taken at once."""
CAPACITY_RAMP_S, CAPACITY_S = 4.0, 8.0
PLANNED = Phase("capacity", 3600.0, 10.0)
TIERS = tuple(SHAPE.tiers)


@dataclass
class Round:
    """One round: every cell by load, tier ("" for all) and mode, and what the loads were chosen by."""

    batch_size: int
    batch_sizes_per_s: dict[int, float]
    capacities_per_s: dict[str, float] = field(default_factory=dict)
    """By load: the capacity just before its phases."""
    cells: dict[str, dict[str, dict[str, Cell]]] = field(default_factory=dict)
    limits: dict[str, list[int]] = field(default_factory=dict)
    """By load: sequence limits of the control loop while our engine was measured."""
    shed: dict[str, float] = field(default_factory=dict)
    """By load: the lowest admitted share of standard requests."""


async def measure_capacity(stock: CompletionClient, seed: int) -> float:
    """Return the requests per second of stock vLLM while more always wait."""
    return await saturated_per_s(
        stock,
        plan_arrivals([PLANNED], SHAPE, seed),
        CAPACITY_CLIENTS,
        ramp_s=CAPACITY_RAMP_S,
        seconds=CAPACITY_S,
    )


async def measure_sizes(client: CompletionClient) -> dict[int, float]:
    """Return the requests per second of static batches of each size, with always enough waiting."""
    found = {}
    loop = asyncio.get_running_loop()
    for number, size in enumerate(SIZES):
        arrivals = plan_arrivals([PLANNED], SHAPE, 100 + number)
        count = max(2, 128 // size) * size
        due = [Arrival(a.number, 0.0, *_rest(a)) for a in arrivals[:count]]
        began = loop.time()
        await StaticBatches(client, size, WINDOW_S, 600.0).send(due)
        found[size] = count / (loop.time() - began)
    return found


def _rest(arrival: Arrival) -> tuple[str, str, str, int, int]:
    return (
        arrival.phase,
        arrival.tier,
        arrival.session,
        arrival.prompt_tokens,
        arrival.output_tokens,
    )


async def one_round(
    number: int, pair: Pair, control: LiveControl, seconds: dict[str, float]
) -> Round:
    """Measure the capacity, then every load with every mode."""
    async with (
        new_client(pair.stock_url, MODEL, DEADLINE_S) as stock,
        new_client(pair.ours.url, MODEL, DEADLINE_S) as ours,
    ):
        sizes = await measure_sizes(stock)
        found = Round(max(sizes, key=lambda size: sizes[size]), sizes)
        print(f"round {number + 1}: static batches, requests/s by size: {sizes}", flush=True)
        for place, (load, share) in enumerate(LOADS.items()):
            seed = 1000 + 10 * number + place
            capacity = await measure_capacity(stock, seed + 500)
            found.capacities_per_s[load] = capacity
            print(f"  load {load}: {share} of {capacity:.1f} requests/s", flush=True)
            phase = Phase(load, seconds[load], share * capacity)
            arrivals = plan_arrivals([phase], SHAPE, seed)
            cells: dict[str, dict[str, Cell]] = {tier: {} for tier in ("", *TIERS)}
            turn = (number + place) % len(MODES)
            for mode in (*MODES[turn:], *MODES[:turn]):
                began = time.time()
                answers = await send(mode, stock, ours, arrivals, found.batch_size)
                for tier, row in cells.items():
                    row[mode] = cell_of(answers, WARM_S, seconds[load], tier)
                if mode == OURS:
                    _note_control(found, load, control, began)
                print(f"  load {load}, {mode}: {cells[''][mode]}", flush=True)
            found.cells[load] = {t: {m: row[m] for m in MODES} for t, row in cells.items()}
    return found


async def send(
    mode: str,
    stock: CompletionClient,
    ours: CompletionClient,
    arrivals: Sequence[Arrival],
    size: int,
) -> list[Answer]:
    """Send the requests of a phase in one mode; return when all have ended."""
    if mode == STATIC:
        return await StaticBatches(stock, size, WINDOW_S, DEADLINE_S).send(arrivals)
    return await send_each(stock if mode == ASYNC else ours, arrivals, DEADLINE_S)


def _note_control(found: Round, load: str, control: LiveControl, began: float) -> None:
    made = [decision for at, decision in list(control.decisions) if at >= began]
    found.limits[load] = [decision.in_force.sequences for decision in made]
    found.shed[load] = min((decision.admission.admit[1] for decision in made), default=1.0)


def rounds_of(rounds: Sequence[Round], load: str, tier: str) -> Rounds:
    """Return the cells of a load and a tier, round by round."""
    return [found.cells[load][tier] for found in rounds]


def render(rounds: Sequence[Round], seconds: dict[str, float], cores: float) -> str:
    """Return the section of RESULTS.md."""
    top = list(LOADS)[-1]
    capacity = median(value for found in rounds for value in found.capacities_per_s.values())
    sizes = ", ".join(
        f"{size}: {median(found.batch_sizes_per_s[size] for found in rounds):.0f}" for size in SIZES
    )
    chosen = ", ".join(str(found.batch_size) for found in rounds)
    return "\n\n".join(
        [
            "    .venv/bin/python benchmarks/serving/batch_against_async.py",
            (
                f"Stock vLLM and an engine with Fleetkeeper, same options (at most {MAX_SEQUENCES} sequences, prefix caching "
                f"off), the tiny model, one engine measured at a time. The engines have {cores:g} of {os.cpu_count()} cores, with priority over "
                "other processes, and the client has priority too. Objectives and queue limits are those of "
                "`examples/tiny.yaml`; the control loop decides every 5 s in the benchmark's process, with one replica. "
                f"Requests: realtime and standard, 7:3, 16 to 64 tokens in and out, Poisson arrivals, not streamed, no "
                f"retries. A client hangs up {DEADLINE_S:.0f} s after it should have sent its request. Latencies count from that time and "
                "cover the requests that succeeded."
            ),
            (
                f"Loads are shares of the capacity of stock vLLM, measured just before each (median {capacity:.0f} requests/s). "
                f"Phases last {', '.join(f'{value:.0f} s' for value in seconds.values())}; the first {WARM_S:.0f} s do not count. Static batches of "
                f"{', '.join(map(str, SIZES))} with enough requests waiting: requests/s {sizes}. Each round uses the fastest size ({chosen}); "
                f"a batch waits at most {1e3 * WINDOW_S:.0f} ms to fill. Medians of {len(rounds)} rounds; ratios are computed within a round (lowest and highest in "
                "parentheses)."
            ),
            mode_table({load: rounds_of(rounds, load, "") for load in LOADS}, ASYNC),
            f"By tier, at {top} times the capacity:",
            tier_table({tier: rounds_of(rounds, top, tier) for tier in TIERS}),
            control_table(rounds),
            measured_on(),
        ]
    )


def control_table(rounds: Sequence[Round]) -> str:
    """Return what the control loop did: it starts with low limits and raises them while requests wait."""
    headings = ["control loop", *(f"load {load}" for load in LOADS)]
    rows = []
    for number, found in enumerate(rounds):
        limits = [f"{min(found.limits[load])} to {max(found.limits[load])}" for load in LOADS]
        rows.append([f"round {number + 1}: sequence limit", *limits])
        admitted = [f"{100 * found.shed[load]:.0f}%" for load in LOADS]
        rows.append([f"round {number + 1}: standard requests admitted, at least", *admitted])
    return markdown_table(headings, rows)


async def measure(args: argparse.Namespace, directory: Path) -> list[Round]:
    """Start both engines and measure all rounds."""
    seconds = phase_seconds(args)
    rounds = []
    with (
        CpuShare(args.cores) as engines,
        CpuShare(None) as own,
        running_pair(directory, engines.enter) as pair,
        LiveControl(pair.ours, control_settings()) as control,
    ):
        # The client and the control loop must not wait for a CPU, whatever else runs here.
        own.enter()
        await warm_up(pair, args.warm_seconds)
        for number in range(args.rounds):
            rounds.append(await one_round(number, pair, control, seconds))
            keep(rounds, args)
    return rounds


async def warm_up(pair: Pair, seconds: float) -> None:
    """Load both engines at the capacity of stock vLLM.

    Kernels are chosen in the first steps, and the control loop does not judge a pod's first minute.
    After that it raises the limits by at most a quarter every 30 s, from 16 to 64 sequences in
    minutes.
    """
    async with (
        new_client(pair.stock_url, MODEL, DEADLINE_S) as stock,
        new_client(pair.ours.url, MODEL, DEADLINE_S) as ours,
    ):
        rate = await measure_capacity(stock, 99)
        await send_each(ours, plan_arrivals([Phase("warm", seconds, rate)], SHAPE, 98), DEADLINE_S)


def phase_seconds(args: argparse.Namespace) -> dict[str, float]:
    """Return the length of each load's phase."""
    *others, top = LOADS
    return {**dict.fromkeys(others, args.seconds), top: args.overload_seconds}


def keep(rounds: Sequence[Round], args: argparse.Namespace) -> None:
    """Write what was measured so far: an interrupted run keeps its rounds."""
    text = render(rounds, phase_seconds(args), args.cores)
    rows: list[dict[str, Any]] = [asdict(found) for found in rounds]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.write:
        write_section(HEADING, text)
    print(text, flush=True)


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a phase")
    parser.add_argument("--overload-seconds", type=float, default=50.0, help="of the highest load")
    parser.add_argument("--cores", type=float, default=1.25, help="of both engines together")
    parser.add_argument("--warm-seconds", type=float, default=300.0)
    parser.add_argument(
        "--json", type=Path, default=Path("out/benchmarks/batch_against_async.json")
    )
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    # A terminated measurement leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(args, Path(name)))


if __name__ == "__main__":
    main()
