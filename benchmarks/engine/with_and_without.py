"""Throughput of one engine with and without our code, switched several times a second.

Two engines on a shared machine differ by more than our code costs: by the placement of their
memory, and by the activity of other processes. Here both sides are one process, so fluctuations of
the host affect both.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import runpy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from clients import CONCURRENCIES, warm_load
from shared_words import shared_words

from tests.support.engine.inside_engine import InsideEngine, client

INSIDE = Path(__file__).resolve().parent / "switched_inside"
WITHOUT, WITH = SIDES = (0, 1)
STARTS = 5
ROUND_S = 90.0
"""Per start and number of clients."""
MIN_TURN_S = 0.05
MAX_TURN_S = 0.1
"""Per turn: many steps, and much shorter than the host's fluctuations."""
BLOCKS = 8
"""Parts of a round, whose spread gives its error."""
POLL_S = 0.002
PATIENCE_S = 60.0
_WORDS: dict[str, int] = {
    name: place
    for name, place in runpy.run_path(str(INSIDE / "switched.py")).items()
    if name in ("WANTED", "ACTIVE", "NS", "TOKENS")
}


class Turn(NamedTuple):
    """The work of an engine in one turn."""

    seconds: float
    tokens: int


Cycle = tuple[Turn, Turn]
"""One turn without and one with our code, one after the other in random order."""


class Switch:
    """The counters shared with the engine's processes (`switched_inside/switched.py`)."""

    def __init__(self, file: Path) -> None:
        self._words = shared_words(file)
        self.environment = {
            "PYTHONPATH": str(INSIDE),
            "FLEETKEEPER_BENCHMARK_SWITCH": str(file),
        }
        self.inside = ("--scheduler-cls=switched.scheduler", "--middleware=switched.Tiers")

    async def cycles(self, seconds: float) -> list[Cycle]:
        """Run turns of both sides for this time."""
        dice = random.Random(1)
        over = time.perf_counter() + seconds
        found: list[Cycle] = []
        while time.perf_counter() < over:
            order = dice.sample(SIDES, len(SIDES))
            snapshots = [await self._begin(order[0])]
            length_s = dice.uniform(MIN_TURN_S, MAX_TURN_S)
            for following in (order[1], WITH):
                await asyncio.sleep(length_s)
                snapshots.append(await self._begin(following))
            turns = dict(
                zip(order, itertools.starmap(_turn, itertools.pairwise(snapshots)), strict=True)
            )
            found.append((turns[WITHOUT], turns[WITH]))
        return found

    async def _begin(self, side: int) -> Turn:
        """Return the totals of all previous turns once the engine has begun a turn of this side."""
        words, wanted, active = self._words, _WORDS["WANTED"], _WORDS["ACTIVE"]
        # Another number each time, so that the same side also begins a new turn.
        words[wanted] = words[wanted] // 2 * 2 + 2 + side
        deadline = time.monotonic() + PATIENCE_S
        while words[active] != words[wanted]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the engine started no turn within {PATIENCE_S:.0f} s; see its log"
                )
            await asyncio.sleep(POLL_S)
        return Turn(words[_WORDS["NS"]] / 1e9, words[_WORDS["TOKENS"]])


def _turn(before: Turn, after: Turn) -> Turn:
    return Turn(after.seconds - before.seconds, after.tokens - before.tokens)


async def measure(
    directory: Path, locked: Callable[[], AbstractContextManager[None]]
) -> dict[str, Any]:
    """Measure several starts of one engine; return the figures for each number of clients."""
    found: dict[str, Any] = {str(clients): [] for clients in CONCURRENCIES}
    for start in range(STARTS):
        with locked():
            switch = Switch(directory / "switch")
            engine = InsideEngine(directory, environment=switch.environment, inside=switch.inside)
            try:
                async with client() as session:
                    for clients in CONCURRENCIES:
                        async with warm_load(engine, session, clients):
                            cycles = await switch.cycles(ROUND_S)
                        row = figures_of(cycles)
                        found[str(clients)].append(row)
                        print(f"start {start + 1} of {STARTS}, {clients} clients:", row, flush=True)
            finally:
                engine.stop()
    return found


def ratio_of(cycles: Sequence[Sequence[Turn]], engine: int, against: Sequence[int]) -> float:
    """Return an engine's token rate relative to the mean of others: the middle half of all cycles.

    A cycle's value is 2 (a - b) / (a + b), which always lies between -2 and 2.
    A host that stands still for a turn changes the mean over all cycles by hundredths, and the
    middle half not at all.

    Raises:
        ValueError: no cycle has tokens.
    """
    words = []
    for cycle in cycles:
        rates = [tokens / seconds for seconds, tokens in cycle]
        own, other = rates[engine], fmean(rates[number] for number in against)
        if own + other > 0.0:
            words.append(2.0 * (own - other) / (own + other))
    if not words:
        raise ValueError(f"no tokens in {len(cycles)} cycles")
    words.sort()
    cut = len(words) // 4
    middle = fmean(words[cut : len(words) - cut])
    return (2.0 + middle) / (2.0 - middle)


def figures_of(cycles: Sequence[Cycle]) -> dict[str, float]:
    """Return the figures of one start: the throughput ratio with its standard error, and rates."""
    size = len(cycles) // BLOCKS
    blocks = [ratio_of(cycles[n * size : (n + 1) * size], WITH, [WITHOUT]) for n in range(BLOCKS)]
    without, with_ours = (
        sum(cycle[side].tokens for cycle in cycles) / sum(cycle[side].seconds for cycle in cycles)
        for side in SIDES
    )
    return {
        "ratio": ratio_of(cycles, WITH, [WITHOUT]),
        "error": stdev(blocks) / BLOCKS**0.5,
        "without_tokens_per_s": without,
        "with_tokens_per_s": with_ours,
        "cycles": len(cycles),
    }


def render(part: dict[str, Any]) -> str:
    """Return the section of the report."""
    lines = [
        f"## One engine, switched between our code and stock: {STARTS} starts, {ROUND_S:.0f} s each\n",
        (
            f"While it serves, one process is switched every {MIN_TURN_S} to {MAX_TURN_S} s between our scheduler with "
            "middleware and vLLM's own scheduler without it. So neither the placement of memory nor fluctuations of the host "
            "differ between the two. The middle half of the turn pairs counts. The table has the median of the starts, and their mean with its "
            "standard error (from the spread within starts or between them, whichever is larger).\n"
        ),
        "| clients | tok/s without | tok/s with | **with / without** | mean | each start |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for clients, starts in sorted(part["figures"].items(), key=lambda item: int(item[0])):
        within = sum(start["error"] ** 2 for start in starts) ** 0.5 / len(starts)
        error = max(within, stdev(start["ratio"] for start in starts) / len(starts) ** 0.5)
        each = ", ".join(f"{start['ratio']:.3f}" for start in starts)
        lines.append(
            f"| {clients} | {fmean(start['without_tokens_per_s'] for start in starts):.0f} "
            f"| {fmean(start['with_tokens_per_s'] for start in starts):.0f} "
            f"| **{median(start['ratio'] for start in starts):.3f}** "
            f"| {fmean(start['ratio'] for start in starts):.3f} ± {error:.3f} | {each} |"
        )
    return "\n".join(lines) + "\n"
