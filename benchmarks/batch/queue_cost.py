"""What the queue of batches costs: processor time and bytes of Redis, for each line and each chunk.

    python benchmarks/batch/queue_cost.py            # a minute; writes its section of RESULTS.md
    python benchmarks/batch/queue_cost.py --quick    # a few seconds, to see that it runs; prints alone

The server is a real redis-server on loopback that appends every write to its file (everysec). There is no store and
no line: the queue alone is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
from results_page import markdown_table, measured_on, write_section  # noqa: E402 -- on the path above

from fleetkeeper_gateway.batch.model import MAX_CHUNK_LINES, MAX_LINES  # noqa: E402 -- on the path above
from fleetkeeper_gateway.batch.queue import RedisQueue  # noqa: E402 -- on the path above
from tests.gateway.batch.queue.memory import MAX_BYTES, memory_of_states  # noqa: E402 -- on the path above
from tests.gateway.batch.queue.world import KEY, World  # noqa: E402 -- on the path above
from tests.support.services.redis_server import RedisServer, redis_server  # noqa: E402 -- on the path above

CHUNKS: Final = -(-MAX_LINES // MAX_CHUNK_LINES)
"""Of a batch of the most lines, if they are short."""
HELD: Final = 4
"""Chunks that a process holds at the same time."""
RENEWALS: Final = 6
"""Of a chunk that is held for a minute."""
MAX_MS: Final = 1.0
HEADING: Final = "The queue: time and bytes"
TITLE: Final = "# Batches, measured\n"
BEFORE: Final = {"waiting": "22 B a line", "held": "106 B a line", "line": "0.084 ms", "chunk": "-"}
"""Of the queue by lines that this one has replaced, in RESULTS.md of its time (64 lines in each call)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds for each chunk: the time of calls, and the processor time of client and server."""

    add: float
    take: float
    renew: float
    done: float
    processor: float


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


async def cost_of(world: World, queue: RedisQueue, batches: int) -> Cost:
    """Return what the chunks of some batches cost from their adding to their end."""
    add, take, renew, done = Clock(), Clock(), Clock(), Clock()
    before = server_s(world.redis)
    with add.running():
        for _ in range(batches):
            await world.submit(queue, CHUNKS)
    ended = 0
    while ended < batches * CHUNKS:
        with take.running():
            held = await queue.take(KEY, HELD)
        for _ in range(RENEWALS):
            with renew.running():
                assert not await queue.renew(held, {KEY: 256})
        for chunk in held:
            with done.running():
                await queue.done(chunk)
        ended += len(held)
    clocks = (add, take, renew, done)
    processor_s = server_s(world.redis) - before + sum(each.client_s for each in clocks)
    seconds = (*(each.wall_s for each in clocks), processor_s)
    return Cost(*(1000 * each / (batches * CHUNKS) for each in seconds))


async def measure(batches: int, passes: int) -> tuple[dict[str, float], Cost]:
    """Return bytes for each chunk in each state, and medians of its cost."""
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder), "--appendonly", "yes", "--appendfsync", "everysec") as server,
    ):
        world = World(server)
        queue = await world.queue("benchmark")
        costs = [await cost_of(world, queue, batches) for _ in range(passes)]
        memory = await memory_of_states(world, queue, batches, CHUNKS)
        await world.close()
    names = ("add", "take", "renew", "done", "processor")
    return memory, Cost(
        *(statistics.median(getattr(cost, name) for cost in costs) for name in names)
    )


def main() -> None:
    """Measure and print; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs; write nothing")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    batches, passes = (2, 1) if args.quick else (20, 3)
    memory, cost = asyncio.run(measure(batches, passes))
    line_ms = cost.processor / MAX_CHUNK_LINES
    parts = (
        f"add {cost.add:.2f}, take {cost.take:.2f}, {RENEWALS} renewals of {HELD} chunks "
        f"{cost.renew:.2f}, done {cost.done:.2f}"
    )
    rows = [
        *(
            [f"memory of a chunk, {state}", BEFORE[state], f"{each:.0f} B", f"{MAX_BYTES} B"]
            for state, each in memory.items()
        ),
        ["processor time of a chunk", BEFORE["chunk"], f"{cost.processor:.2f} ms", ""],
        ["time of calls of a chunk", "-", f"{sum_of(cost):.2f} ms ({parts})", ""],
        ["processor time of a line", BEFORE["line"], f"{line_ms:.4f} ms", f"{MAX_MS:g} ms"],
    ]
    table = markdown_table(["", "before", "measured", "at most"], rows)
    print(table)
    if not args.quick:
        write_section(HEADING, f"{ABOUT}\n\n{table}\n\n{measured_on()}", HERE / "RESULTS.md", TITLE)
    if line_ms > MAX_MS or max(memory.values()) > MAX_BYTES:
        sys.exit("a bound was missed")


def sum_of(cost: Cost) -> float:
    """Return the time of all calls for a chunk."""
    return cost.add + cost.take + cost.renew + cost.done


ABOUT: Final = f"""    python benchmarks/batch/queue_cost.py

Batches of {MAX_LINES:,} lines are {CHUNKS} chunks each. One Redis on loopback, medians of 3 passes. Bytes are what the
server uses more than before, without buffers. Processor time is that of the client and of the server together. A
chunk is renewed {RENEWALS} times, as one that takes a minute. Before: the queue by lines, which took 64 at a time."""


if __name__ == "__main__":
    main()
