"""Time-windowed batching, the batch tier and an unlimited client, on one real vLLM on CPU.

    python benchmarks/batch/windows.py            # a quarter of an hour; writes RESULTS.md
    python benchmarks/batch/windows.py --process  # ten minutes: the batch process, without windows; another section
    python benchmarks/batch/windows.py --quick    # two minutes, to see that it runs; prints alone

The classic way to fill a batch is a window: a client collects requests until so many are there or a
time has passed, sends them together, and waits for all. Continuous batching needs no window: the
engine admits a request at each step. Three comparisons, each in blocks whose modes alternate:

- lines that are all there at the start: tokens a second, and when a line has its answer;
- lines that arrive at 0.7 times the capacity: the latency of each;
- realtime requests without batch, and beside a full queue of the batch tier.

It needs `make setup-engine`. The batch process itself runs too, unless --without-process is given.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "gateway")]

from proxy_figures import percentile, rotated  # noqa: E402 - on the path set above
from real_process import run_file, running_process, write_lines  # noqa: E402
from results_page import measured_on, write_section  # noqa: E402
from window_figures import (  # noqa: E402
    AGAIN,
    ALONE,
    BESIDE,
    PROCESS,
    Cell,
    Found,
    Realtime,
    bucket_p99_s,
    cell_of,
    page,
    process_page,
)
from window_modes import MODES, TIER, UNLIMITED, Mode, full_queue, patient_client  # noqa: E402

from fleetkeeper_contract.tiers import Tier  # noqa: E402
from fleetkeeper_engine.shm.layout import SchedulerBlock  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.load.client import CompletionClient  # noqa: E402
from fleetkeeper_local.load.open_loop import run_open_loop  # noqa: E402
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals  # noqa: E402
from tests.support.engine.inside_engine import MODEL, SETTINGS, InsideEngine  # noqa: E402

HEADING = "Time-windowed batching and the batch tier"
PROCESS_HEADING = "The batch process beside an unlimited client"
LONG_LINES = 1500
"""So many that upload, validation and the files of results take a small part of the time."""
TITLE = "# Batches, measured\n"
LENGTHS = (8, 128)
"""Tokens of an answer. A window waits for its longest."""
LOAD = 0.7
REALTIME_LOAD = 0.3
QUEUES = 4096
"""Lines that may wait, so that the unlimited client gets no 429."""


Run = Callable[[Sequence[Arrival]], Awaitable[Cell]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    blocks: int
    lines: int
    arriving_s: float
    realtime_s: float
    long_lines: int = LONG_LINES


FULL, QUICK = Size(3, 256, 12.0, 40.0), Size(1, 64, 6.0, 8.0, long_lines=256)


def main() -> None:
    """Measure and print; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs; write nothing")
    parser.add_argument(
        "--process", action="store_true", help="measure the process, and no windows"
    )
    parser.add_argument("--without-process", action="store_true", help="leave the process out")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    if args.process and args.without_process:
        parser.error("--process needs the process")
    size = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
        settings = replace(SETTINGS, standard_queue_limit=QUEUES, batch_queue_limit=QUEUES)
        engine = InsideEngine(Path(folder) / "engine", settings)
        try:
            measuring = Measuring(engine, size, Path(folder), with_process=not args.without_process)
            found = asyncio.run(measuring.run(only_process=args.process))
        finally:
            engine.stop()
    text = (
        f"{measured_on()} vLLM on CPU with the tiny model, at most {SETTINGS.max_sequences} sequences at "
        f"a time, answers of {LENGTHS[0]} to {LENGTHS[1]} tokens; {size.blocks} blocks. Engine and clients "
        f"share the machine.\n\n{(process_page if args.process else page)(found)}\n"
    )
    print(text)
    if not args.quick:
        write_section(PROCESS_HEADING if args.process else HEADING, text, args.out, title=TITLE)


class Measuring:
    """One run on an engine."""

    def __init__(
        self, engine: InsideEngine, size: Size, folder: Path, *, with_process: bool
    ) -> None:
        self._engine, self._size, self._folder = engine, size, folder
        self._with_process = with_process
        self._offline: list[dict[str, Cell]] = []
        self._long: list[dict[str, Cell]] = []
        self._arriving: list[dict[str, Cell]] = []
        self._realtime: list[dict[str, Realtime]] = []
        self._rates: list[float] = []

    async def run(self, *, only_process: bool = False) -> Found:
        """Return the figures of all blocks. `only_process`: without windows, and with long batches."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(patient_client(self._engine.url, MODEL))
            runs = {name: self._mode(client, tier, send) for name, (tier, send) in MODES.items()}
            every = dict(runs)
            if self._with_process:
                process = await stack.enter_async_context(
                    running_process(self._folder / "process", self._engine.url, MODEL)
                )

                async def through_process(lines: Sequence[Arrival]) -> Cell:
                    path = self._folder / "lines.jsonl"
                    write_lines(path, MODEL, lines)
                    took_s, failed = await run_file(process.api, path)
                    tokens = sum(line.output_tokens for line in lines)
                    # Its client reads the results when the whole batch has ended.
                    return Cell(tokens / took_s, took_s, took_s, failed)

                every[PROCESS] = through_process
            await self._mode(client, "standard", MODES[UNLIMITED][1])(_lines(32, 0))  # warm
            for number in range(self._size.blocks):
                if only_process:
                    three = {name: every[name] for name in (UNLIMITED, TIER, PROCESS)}
                    await self._process_block(number, client, three)
                else:
                    await self._block(number, client, runs, every)
        return Found(
            self._offline, self._arriving, self._realtime, self._size.lines, self._rates, self._long
        )

    async def _offline_block(
        self,
        number: int,
        modes: dict[str, Run],
        lines: Sequence[Arrival],
    ) -> dict[str, Cell]:
        """Measure lines that are all there at the start."""
        found = {}
        for name in rotated(list(modes), number):
            await self._engine.until_idle()
            found[name] = await modes[name](lines)
        return {name: found[name] for name in modes}

    def _mode(self, client: CompletionClient, tier: str, send: Mode) -> Run:
        async def run(lines: Sequence[Arrival]) -> Cell:
            due = [replace(line, tier=tier) for line in lines]
            return cell_of(due, await send(client, due))

        return run

    async def _block(
        self,
        number: int,
        client: CompletionClient,
        runs: dict[str, Run],
        every: dict[str, Run],
    ) -> None:
        size = self._size
        say(f"block {number + 1} of {size.blocks}: all lines at the start")
        lines = _lines(size.lines, number)
        self._offline.append(await self._offline_block(number, every, lines))
        capacity_per_s = _lines_per_s(self._offline[-1], lines)
        say(f"block {number + 1}: lines that arrive")
        rate = LOAD * capacity_per_s
        self._rates.append(rate)
        arriving = {}
        due = _planned(size.arriving_s, rate, 1000 + number)
        modes = [name for name in runs if name != UNLIMITED]
        for name in rotated(modes, number):
            await self._engine.until_idle()
            arriving[name] = await runs[name](due)
        self._arriving.append({name: arriving[name] for name in modes})
        await self._realtime_block(number, client, capacity_per_s)

    async def _process_block(
        self, number: int, client: CompletionClient, modes: dict[str, Run]
    ) -> None:
        short, long = _lines(self._size.lines, number), _lines(self._size.long_lines, number)
        say(f"block {number + 1} of {self._size.blocks}: {len(short)} lines, then {len(long)}")
        self._offline.append(await self._offline_block(number, modes, short))
        self._long.append(await self._offline_block(number, modes, long))
        await self._realtime_block(number, client, _lines_per_s(self._long[-1], long))

    async def _realtime_block(self, number: int, client: CompletionClient, per_s: float) -> None:
        say(f"block {number + 1}: realtime requests")
        asked = _planned(self._size.realtime_s, REALTIME_LOAD * per_s, 2000 + number)
        realtime = {}
        order = (ALONE, BESIDE, AGAIN) if number % 2 == 0 else (AGAIN, BESIDE, ALONE)
        for name in order:
            await self._engine.until_idle()
            realtime[name] = await self._realtime_run(client, asked, beside=name == BESIDE)
        self._realtime.append({name: realtime[name] for name in (ALONE, AGAIN, BESIDE)})

    async def _realtime_run(
        self, client: CompletionClient, asked: Sequence[Arrival], *, beside: bool
    ) -> Realtime:
        due = [replace(line, tier="realtime") for line in asked]
        if not beside:
            return await self._realtime_cell(client, due)
        lines = [replace(line, tier="batch") for line in _lines(1000, 7)]
        async with full_queue(client, lines) as queue:
            # The first lines are in the engine, and others wait.
            await self._engine.until(
                lambda: self._engine.middleware().waiting[Tier.BATCH] > 0, 60.0
            )
            answered, began_s = queue.answered, asyncio.get_running_loop().time()
            cell = await self._realtime_cell(client, due)
            took_s = asyncio.get_running_loop().time() - began_s
            per_s = (queue.answered - answered) / took_s
            return replace(cell, lines_per_s=per_s, failed=cell.failed + queue.failed)

    async def _realtime_cell(self, client: CompletionClient, due: Sequence[Arrival]) -> Realtime:
        before = self._engine.scheduler()
        samples = await run_open_loop(client.send, due)
        first = [s.first_token_s for s in samples if s.first_token_s is not None]
        after = await self._scheduled(before, len(first))
        times = [s.outcome.time_per_token_s for s in samples]
        each = [time_s for time_s in times if time_s is not None]
        tier = Tier.REALTIME
        count = sum(after.queue_wait_of(tier)) - sum(before.queue_wait_of(tier))
        return Realtime(
            percentile(first, 0.5),
            percentile(first, 0.99),
            (after.queue_wait_sum[tier] - before.queue_wait_sum[tier]) / count,
            bucket_p99_s(before.queue_wait_of(tier), after.queue_wait_of(tier)),
            percentile(each, 0.5),
            percentile(each, 0.99),
            len(samples) - len(first),
        )

    async def _scheduled(self, before: SchedulerBlock, count: int) -> SchedulerBlock:
        """Return the block once it has all requests; it is written a little late."""
        tier = Tier.REALTIME

        def has_all() -> bool:
            now = self._engine.scheduler()
            return sum(now.queue_wait_of(tier)) - sum(before.queue_wait_of(tier)) >= count

        await self._engine.until(has_all, 60.0)
        return self._engine.scheduler()


def _lines_per_s(cells: dict[str, Cell], lines: Sequence[Arrival]) -> float:
    """Return the lines that the unlimited client had answered in a second."""
    tokens = sum(line.output_tokens for line in lines)
    return cells[UNLIMITED].tokens_per_s * len(lines) / tokens


def _lines(count: int, seed: int) -> list[Arrival]:
    """Return lines that are all there at the start."""
    planned = plan_arrivals([Phase("lines", 2.0 * count + 100, 1.0)], _shape(), seed)
    return [replace(line, at_s=0.0) for line in planned[:count]]


def _planned(seconds: float, rate: float, seed: int) -> list[Arrival]:
    return list(plan_arrivals([Phase("lines", seconds, rate)], _shape(), seed))


def _shape() -> Shape:
    return Shape(tiers={"standard": 1.0}, output_tokens=LENGTHS)


if __name__ == "__main__":
    main()
