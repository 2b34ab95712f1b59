"""Throughput and latency of stock vLLM and of our engine, same flags, alternating within a second."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import aiohttp
from clients import CONCURRENCIES, WARM_S, Load
from shared_words import shared_words
from turns import MAX_TURN_S, MIN_TURN_S, Turn, ratio_of, taking_turns

from tests.support.inside_engine import InsideEngine, client

COUNTED = Path(__file__).resolve().parent / "counted"
SIDES = {"stock": False, "again": False, "ours": True}
"""The compared engines, and whether our code is in them. The second stock one shows the noise."""
STARTS = 5
"""Starts of an engine differ for their whole life: by 1 to 2%, on a busy host by 10%."""
START_ROUND_S = 8.0
"""Per start and number of clients, by the clock of each engine."""


class Tokens:
    """The counter of an engine's tokens (`counted/counted_scheduler.py`)."""

    def __init__(self, file: Path, *, ours: bool) -> None:
        self._words = shared_words(file)
        self.environment = {
            "PYTHONPATH": str(COUNTED),
            "FLEETKEEPER_BENCHMARK_TOKENS": str(file),
        }
        self.words = (f"--scheduler-cls=counted_scheduler.{'ours' if ours else 'stock'}",)

    def so_far(self) -> int:
        """Return the number of tokens since the engine's start."""
        return self._words[0]


@contextlib.contextmanager
def running(directory: Path, tokens: dict[str, Tokens]) -> Iterator[dict[str, InsideEngine]]:
    """Run engines with and without our code, started together."""
    engines: dict[str, InsideEngine] = {}
    try:
        for side, ours in SIDES.items():
            engines[side] = InsideEngine(
                directory,
                ours=ours,
                wait=False,
                environment=tokens[side].environment,
                arguments=tokens[side].words,
            )
        for engine in engines.values():
            engine.await_health()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


async def measure(
    directory: Path, locked: Callable[[], contextlib.AbstractContextManager[None]]
) -> dict[str, Any]:
    """Measure stock vLLM, stock vLLM again, and ours, alternating; several starts of each."""
    found: dict[str, Any] = {str(clients): [] for clients in CONCURRENCIES}
    for start in range(STARTS):
        tokens = {
            side: Tokens(directory / f"tokens-{side}", ours=ours) for side, ours in SIDES.items()
        }
        with locked(), running(directory, tokens) as engines:
            counts = [tokens[side].so_far for side in engines]
            async with client() as session:
                for clients in CONCURRENCIES:
                    row = await side_by_side(list(engines.values()), counts, session, clients)
                    found[str(clients)].append(row)
                    ratios = {side: f"{row['ratios'][side]:.3f}" for side in ("again", "ours")}
                    print(f"start {start + 1} of {STARTS}, {clients} clients:", ratios, flush=True)
    return found


async def side_by_side(
    engines: list[InsideEngine],
    counts: list[Callable[[], int]],
    session: aiohttp.ClientSession,
    clients: int,
) -> dict[str, dict[str, Any]]:
    """Return each side's figures and ratios for one start."""
    with taking_turns([engine.group for engine in engines], lambda n: counts[n]()) as turns:
        loads = [
            Load(engine, session, clients, functools.partial(turns.clock, number))
            for number, engine in enumerate(engines)
        ]
        try:
            await asyncio.gather(*(load.next_round(WARM_S) for load in loads))
            warm = len(turns.cycles)
            figures = await asyncio.gather(*(load.next_round(START_ROUND_S) for load in loads))
            cycles = turns.cycles[warm:]
        finally:
            await asyncio.gather(*(load.end() for load in loads))
    return {
        "figures": dict(zip(SIDES, figures, strict=True)),
        "ratios": ratios_of(cycles),
    }


def ratios_of(cycles: list[list[Turn]]) -> dict[str, float]:
    """Return the ratios of our engine to both stock engines, and of the second stock one to the first."""
    stock, again, ours = (list(SIDES).index(side) for side in ("stock", "again", "ours"))
    return {
        "again": ratio_of(cycles, again, [stock]),
        "ours": ratio_of(cycles, ours, [stock, again]),
    }


def cpu_ratio_of(start: dict[str, Any]) -> float:
    """Return the ratio of CPU time per token, ours to the mean of both stock engines."""
    figures = {side: start["figures"][side]["cpu_ms_per_token"] for side in SIDES}
    return float(figures["ours"] / fmean((figures["stock"], figures["again"])))


def render(part: dict[str, Any]) -> str:
    """Return the section of the report."""
    figures = sorted(part["figures"].items(), key=lambda item: int(item[0]))
    lines = [
        f"## Throughput against stock vLLM, same flags: {STARTS} starts, {START_ROUND_S:.0f} s each\n",
        (
            "Two stock engines and ours are under constant load and run in turn, for "
            f"{MIN_TURN_S} to {MAX_TURN_S} s each. While one runs, the other two are halted; rates and latencies use a clock "
            "that stops while an engine is halted. So other activity on the machine affects all alike. Of each start, the middle "
            "half of its cycles counts (a cycle is one turn of each engine). Starts of an engine differ from one another; "
            "the figures are means over the starts with their standard error. Stock against stock shows the noise.\n"
        ),
        "| clients | stock tok/s | ours tok/s | **ours / stock** | stock / stock | CPU time per token, ours / stock | stock p50 / p99 ms | ours p50 / p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for clients, starts in figures:
        rate, p50, p99 = (
            {side: median(start["figures"][side][key] for start in starts) for side in SIDES}
            for key in ("tokens_per_s", "p50_s", "p99_s")
        )
        ours, again = ([start["ratios"][side] for start in starts] for side in ("ours", "again"))
        lines.append(
            f"| {clients} | {rate['stock']:.0f} | {rate['ours']:.0f} | **{_spread(ours)}** "
            f"| {_spread(again)} | {_spread([cpu_ratio_of(start) for start in starts])} "
            f"| {1e3 * p50['stock']:.0f} / {1e3 * p99['stock']:.0f} | {1e3 * p50['ours']:.0f} / {1e3 * p99['ours']:.0f} |"
        )
    lines.append("\nThroughput of each start, ours / stock:\n")
    for clients, starts in figures:
        ratios = sorted(start["ratios"]["ours"] for start in starts)
        lines.append(f"- {clients} clients: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return "\n".join(lines) + "\n"


def _spread(ratios: list[float]) -> str:
    return f"{fmean(ratios):.3f} ± {stdev(ratios) / len(ratios) ** 0.5:.3f}"
