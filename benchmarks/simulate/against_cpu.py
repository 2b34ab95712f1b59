"""Compare the simulated engine with a real vLLM on this machine's CPU: fit one load, predict others.

    .venv/bin/python benchmarks/simulate/against_cpu.py

One engine runs with Fleetkeeper's scheduler and middleware. A closed loop measures its capacity. Then
three loads of the same kind are sent, Poisson arrivals at 0.5, 0.3 and 0.7 of that capacity. The sums of
the first one give the coefficients, by the code of the operator. The simulator plays all loads with
these coefficients: the same requests, arrival times, limits and KV cache. The section in RESULTS.md is
replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "serving")]

import aiohttp  # noqa: E402 - the path to inside_engine is set above
from cpu_share import CpuShare  # noqa: E402
from errors_table import Pair, errors_table, goals_table  # noqa: E402
from replayed_load import (  # noqa: E402
    Ended,
    Figures,
    Limits,
    Reading,
    Simulated,
    figures_of,
    fitted,
    sums_of,
)
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper.simulate.hardware import Hardware  # noqa: E402
from fleetkeeper_contract.step_terms import StepClass  # noqa: E402
from fleetkeeper_engine.shm.layout import MiddlewareBlock, Tier  # noqa: E402
from fleetkeeper_local.load.open_loop import prompt_of  # noqa: E402
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals  # noqa: E402
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
READ_EVERY_S = 10.0
"""A window of the control loop."""


@dataclass
class Round:
    """One round: the coefficients from its fitted load, every load measured and simulated."""

    hardware: Hardware
    pairs: dict[str, Pair]
    late_s: float = 0.0
    """The longest that the client sent a request after its time."""
    readings: list[Reading] = field(default_factory=list)
    """Those of the fitted load."""


@dataclass
class Measured:
    """A load as the engine and the client saw it."""

    figures: Figures
    engine_ttft_s: float
    engine_itl_s: float
    late_s: float
    readings: list[Reading] = field(default_factory=list)


class RealEngine:
    """A running engine that loads are sent to."""

    def __init__(self, engine: InsideEngine, session: aiohttp.ClientSession) -> None:
        self._engine = engine
        self._session = session
        self._zero = 0.0

    @property
    def kv_capacity_tokens(self) -> float:
        """The tokens that its KV cache holds."""
        return float(self._engine.scheduler().kv_capacity_tokens)

    async def open_loop(self, arrivals: Sequence[Arrival]) -> Measured:
        """Send requests at their times; return when all have ended."""
        before = await self._start()
        readings = [self._reading()]
        late: list[float] = []

        async def one(arrival: Arrival) -> Ended:
            await asyncio.sleep(max(0.0, arrival.at_s - self._now()))
            late.append(self._now() - arrival.at_s)
            return await self._ask(arrival)

        reader = asyncio.create_task(self._read(readings))
        try:
            ended = await asyncio.gather(*(one(arrival) for arrival in arrivals))
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        await self._engine.until_idle()
        readings.append(self._reading())
        span_s = (0.0, max(row.ended_s for row in ended))
        figures = figures_of(readings[0], readings[-1], ended, span_s)
        return self._measured(
            figures, before, await self._engine.middleware_now(), max(late), readings
        )

    async def closed_loop(
        self, arrivals: Sequence[Arrival], clients: int, span_s: tuple[float, float]
    ) -> Measured:
        """Keep one request of each client in flight until the span ends; the last ones are not waited for.

        Raises:
            ValueError: the planned requests do not last that long.
        """
        await self._start()
        planned, ended = iter(arrivals), list[Ended]()
        begin, end = span_s

        async def one() -> None:
            while self._now() < end:
                arrival = next(planned, None)
                if arrival is None:
                    raise ValueError(f"{len(arrivals)} requests do not last {end:.0f} s")
                ended.append(await self._ask(arrival))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one())
            await asyncio.sleep(begin - self._now())
            middleware, first = await self._engine.middleware_now(), self._reading()
            await asyncio.sleep(end - self._now())
            middleware_after, last = await self._engine.middleware_now(), self._reading()
        figures = figures_of(first, last, ended, span_s)
        return self._measured(figures, middleware, middleware_after, 0.0, [])

    async def _start(self) -> MiddlewareBlock:
        await self._engine.until_idle()
        before = await self._engine.middleware_now()
        self._zero = asyncio.get_running_loop().time()
        return before

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._zero

    async def _ask(self, arrival: Arrival) -> Ended:
        sent_s = self._now()
        answer = await self._engine.stream(
            self._session, arrival.output_tokens, prompt=prompt_of(arrival)
        )
        if answer.tokens != arrival.output_tokens:
            raise RuntimeError(
                f"request {arrival.number}: status {answer.status}, {answer.tokens} tokens"
            )
        first, last = (answer.times[place] - self._zero for place in (0, -1))
        return Ended(sent_s, first, last, answer.tokens)

    async def _read(self, readings: list[Reading]) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, number * READ_EVERY_S - self._now()))
            readings.append(self._reading())

    def _reading(self) -> Reading:
        block = self._engine.scheduler()
        return Reading(
            at_s=self._now(),
            requests=float(sum(block.queue_wait_buckets)),
            wait_s=sum(block.queue_wait_sum),
            steps=float(sum(block.batch_time_buckets)),
            steps_s=block.batch_time_sum,
            sequences=block.batch_sequences_sum,
            decode=sums_of(block.step_model, StepClass.DECODE),
            prefill=sums_of(block.step_model, StepClass.PREFILL),
        )

    def _measured(
        self,
        figures: Figures,
        before: MiddlewareBlock,
        after: MiddlewareBlock,
        late_s: float,
        readings: list[Reading],
    ) -> Measured:
        tier = Tier.STANDARD
        first = sum(after.time_to_first_token_of(tier)) - sum(before.time_to_first_token_of(tier))
        gaps = sum(after.inter_token_latency_of(tier)) - sum(before.inter_token_latency_of(tier))
        return Measured(
            figures,
            (after.time_to_first_token_sum[tier] - before.time_to_first_token_sum[tier]) / first,
            (after.inter_token_latency_sum[tier] - before.inter_token_latency_sum[tier]) / gaps,
            late_s,
            readings,
        )


def planned(rate_per_s: float, seconds: float, seed: int) -> tuple[Arrival, ...]:
    """Return the requests of a load."""
    return plan_arrivals([Phase("load", seconds, rate_per_s)], SHAPE, seed)


def endless() -> tuple[Arrival, ...]:
    """Return more requests than a closed loop asks for."""
    return planned(50.0, 60.0, 7)


async def one_round(real: RealEngine, number: int, capacity_per_s: float, seconds: float) -> Round:
    """Measure all loads, fit the first, and simulate all. Each round has other requests."""
    arrivals = {
        load: planned(share * capacity_per_s, seconds, 100 * number + place)
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
                    rounds.append(await one_round(real, number + 1, capacity, args.seconds))
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
                f"{SHAPE.output_tokens[1]} out, streamed, Poisson arrivals for {args.seconds:.0f} s. Loads as shares of the capacity "
                f'({capacity:.2f} requests/s, a closed loop measured first): {shares}. "{FULL}" is a closed loop of {CLIENTS} clients, '
                f"{begin:.0f} to {end:.0f} s after its start."
            ),
            (
                f'The coefficients come from the step sums of "{FITTED}" alone, read every {READ_EVERY_S:.0f} s, by the code of '
                "`--fit-from-prometheus`. The simulator plays the same requests at the same times, with the same limits and "
                f"KV capacity. Medians of {len(rounds)} rounds, each with its own fit and other requests. The lowest and the highest are in parentheses. "
                "The errors are those of the simulation, relative to the measurement."
            ),
            goals_table(predicted),
            errors_table(loads),
            coefficients_table(rounds),
            measured_on(),
        ]
    )


def coefficients_table(rounds: Sequence[Round]) -> str:
    """Return the coefficients of each round."""
    rows = []
    for number, found in enumerate(rounds):
        costs = found.hardware.costs
        rows.append(
            [
                str(number + 1),
                f"{1e3 * costs.t0_s:.2f}",
                f"{1e3 * costs.w_s:.2f}",
                f"{1e6 * costs.g_s:.1f}",
                f"{1e6 * costs.b_s:.0f}",
                f"{1e9 * costs.c_s:.0f}",
                f"{1e3 * found.late_s:.0f}",
            ]
        )
    headings = ["round", "t0, ms", "w, ms", "g, us per token", "b, us per sequence"]
    headings += ["c, ns per KV token", "client late at most, ms"]
    return markdown_table(headings, rows)


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a load")
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
