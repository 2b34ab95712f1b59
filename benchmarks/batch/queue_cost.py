"""What the queue of batches costs: time and bytes of Redis a line, and the recovery when Redis is lost.

    python benchmarks/batch/queue_cost.py
    python benchmarks/batch/queue_cost.py --lines 5000 --passes 1

The server is a real redis-server on loopback that appends every write to its file (everysec). The store
is in memory: it costs nothing, so that the queue alone is measured. Only a full run (no options) writes
its section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "serving")]
from results_page import markdown_table, measured_on, write_section  # noqa: E402 -- on the path above

from fleetkeeper_gateway.batch.interfaces import Taken  # noqa: E402 -- after the path is set
from fleetkeeper_gateway.batch.queue import RedisQueue, Timing  # noqa: E402 -- after the path is set
from tests.gateway.batch.queue.memory import MOST_BYTES, memory_of_states  # noqa: E402 -- on the path above
from tests.gateway.batch.queue.world import GUARD_S, World  # noqa: E402 -- on the path above
from tests.support.redis_server import RedisServer, redis_server  # noqa: E402 -- on the path above

LINES, PASSES = 50_000, 3
MOST_MS = 1.0
MOST_RECOVERY_S = 30.0
HEADING = "The queue: time and bytes a line"
TITLE = "# Batches, measured\n"


@dataclass(frozen=True, slots=True)
class Way:
    """How lines are taken and committed."""

    name: str
    slots: int
    """Lines of one take, and results of one commit."""
    most_lines: int


WAYS = (Way("64 lines at a time", 64, LINES), Way("line by line", 1, LINES // 50))


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds a line: the time of calls, and the processor time of client and server."""

    add: float
    take: float
    commit: float
    processor: float

    @property
    def total(self) -> float:
        """Return the time of all calls."""
        return self.add + self.take + self.commit


class Clock:
    """Sums the time of one kind of call, and the client's processor time in it."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.client_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what runs inside."""
        wall, client = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall
        self.client_s += time.process_time() - client


def server_s(server: RedisServer) -> float:
    """Return the processor time that the server has used."""
    with server.client() as client:
        found = client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


async def cost_of(world: World, queue: RedisQueue, way: Way, lines: int) -> Cost:
    """Return what one batch costs, without the work on its lines."""
    lines = min(lines, way.most_lines)
    add, take, commit = Clock(), Clock(), Clock()
    before = server_s(world.redis)
    with add.running():
        record = await world.submit(queue, lines)
    done = 0
    while done < lines:
        with take.running():
            taken: Sequence[Taken] = await queue.take({"*": way.slots}, GUARD_S)
        (commits,) = await world.write(taken)
        with commit.running():
            done += len(await queue.commit(commits))
    assert await queue.outstanding(record) == 0
    client_s = sum(each.client_s for each in (add, take, commit))
    processor_s = server_s(world.redis) - before + client_s
    await queue.remove(record)
    await world.batches.forget_active(record)
    seconds = (add.wall_s, take.wall_s, commit.wall_s, processor_s)
    return Cost(*(1000 * each / lines for each in seconds))


async def recovery_of(world: World, queue: RedisQueue, lines: int) -> float:
    """Return the seconds from the loss of Redis to the first line, with half of the lines done."""
    record = await world.submit(queue, lines)
    done = 0
    while done < lines // 2:
        taken = await queue.take({"*": 500}, GUARD_S)
        done += len(await world.finish(queue, taken))
    world.redis.kill()
    world.redis.start()
    began = time.perf_counter()
    await world.until_reset(queue, world.rebuilds() + 1)
    assert await queue.take({"*": 1}, GUARD_S)
    seconds = time.perf_counter() - began
    assert await queue.outstanding(record) == lines - done
    await queue.remove(record)
    await world.batches.forget_active(record)
    return seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of all passes."""

    memory: dict[str, float]
    costs: dict[str, Cost]
    recovery_s: float

    @property
    def met(self) -> bool:
        """Return whether all bounds are kept."""
        memory = all(each <= MOST_BYTES for each in self.memory.values())
        costs = all(each.processor <= MOST_MS for each in self.costs.values())
        return memory and costs and self.recovery_s <= MOST_RECOVERY_S

    def rows(self) -> list[list[str]]:
        """Return a row for each figure."""
        rows = [
            [f"memory, {state}", f"{each:.0f} B", f"{MOST_BYTES} B"]
            for state, each in self.memory.items()
        ]
        for name, each in self.costs.items():
            parts = f"add {each.add:.3f}, take {each.take:.3f}, commit {each.commit:.3f}"
            rows += [
                [f"processor time, {name}", f"{each.processor:.3f} ms", f"{MOST_MS:g} ms"],
                [f"time of calls, {name}", f"{each.total:.3f} ms ({parts})", ""],
            ]
        return [
            *rows,
            ["recovery of the batch", f"{self.recovery_s:.2f} s", f"{MOST_RECOVERY_S:g} s"],
        ]


async def measure(lines: int, passes: int, console: Console) -> Measured:
    """Measure everything against one server."""
    costs: dict[str, list[Cost]] = {way.name: [] for way in WAYS}
    recoveries = []
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder), "--appendonly", "yes", "--appendfsync", "everysec") as server,
    ):
        world = World(server)
        queue = await world.queue("benchmark", Timing(lease_s=3600))
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("passes", total=passes * (len(WAYS) + 1) + 1)
            memory = await memory_of_states(world, queue, lines)
            for record in list(world.batches.records.values()):
                await queue.remove(record)
                await world.batches.forget_active(record)
            progress.advance(task)
            for _ in range(passes):
                for way in WAYS:
                    costs[way.name].append(await cost_of(world, queue, way, lines))
                    progress.advance(task)
                recoveries.append(await recovery_of(world, queue, lines))
                progress.advance(task)
        await world.close()
    medians = {
        name: Cost(
            *(
                statistics.median(getattr(each, part) for each in found)
                for part in ("add", "take", "commit", "processor")
            )
        )
        for name, found in costs.items()
    }
    return Measured(memory, medians, statistics.median(recoveries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--passes", type=int, default=PASSES)
    args = parser.parse_args()
    console = Console()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    measured = asyncio.run(measure(args.lines, args.passes, console))
    headings = ["a line of a batch", "measured", "at most"]
    table = Table(title=f"queue, {args.lines} lines, median of {args.passes}")
    for heading in headings:
        table.add_column(heading)
    for row in measured.rows():
        table.add_row(*row)
    console.print(table)
    if (args.lines, args.passes) == (LINES, PASSES):
        text = f"""    python benchmarks/batch/queue_cost.py

One batch of {LINES:,} lines ({LINES // 50:,} line by line), one Redis on loopback, medians of {PASSES} passes. Bytes
are what the server uses more than before, without buffers. Processor time is that of the client and of the
server together, without the store and without the work on lines. The time of calls contains what one side
waits for the other, and for a processor while others use it. Recovery is the time from a Redis that was
killed and started empty until the first line is taken, with half of the lines done. The store is in memory:
reading segments from a real store comes on top.

{markdown_table(headings, measured.rows())}

{measured_on()}"""
        write_section(HEADING, text, HERE / "RESULTS.md", TITLE)
    if not measured.met:
        sys.exit("a bound was missed")


if __name__ == "__main__":
    main()
