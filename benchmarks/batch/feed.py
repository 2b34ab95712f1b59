"""Whether places follow what ready replicas take, with 1 to 8 replicas' worth of engine, and what a line costs.

    python benchmarks/batch/feed.py            # five minutes; writes its section of RESULTS.md
    python benchmarks/batch/feed.py --quick    # two minutes; prints alone

The process is the one that is shipped. The engine is a stand-in that only waits: each replica runs 64 lines, lets
three times as many wait, and answers 429 to more. Replicas are added one after the other. Then it answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import psutil

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
from real_process import (  # noqa: E402 -- on the path set above
    ENDPOINT,
    create,
    run_file,
    running_process,
    upload,
)
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_local.control_plane.ports import free_ports  # noqa: E402 -- on the path set above
from tests.support.batch.batch_engine import BatchEngine  # noqa: E402

SEQUENCES: Final = 64
"""Lines that a replica runs."""
TAKES: Final = 4 * SEQUENCES
"""Lines that a replica runs or lets wait. The lines that wait feed it while the process sends less after a 429."""
LINE_S: Final = 10.0
SETTLE_S, WATCH_S = 40.0, 10.0
"""A replica takes longer to start. After a 429, lines in flight grow by 32 in the time of one line."""
LEAST: Final = 0.9
LINES: Final = 20_000
HEADING: Final = "Places follow ready replicas"
TITLE: Final = "# Batches, measured\n"
MODEL: Final = "model"


def main() -> None:
    """Measure and print; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="with two sizes; write nothing")
    args = parser.parse_args()
    sizes = (1, 2) if args.quick else (1, 2, 4, 6, 8)
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
        rows = asyncio.run(measure(Path(folder) / "feed", sizes))
        cost = asyncio.run(cost_of_lines(Path(folder) / "cost"))
    table = markdown_table(["replicas", "lines they run", "lines in flight", "fed"], rows)
    text = "\n\n".join((ABOUT, table, cost, measured_on()))
    print(text)
    if not args.quick:
        write_section(HEADING, text, HERE / "RESULTS.md", TITLE)


async def measure(folder: Path, sizes: tuple[int, ...]) -> list[list[str]]:
    """Return a row for each number of replicas."""
    path = input_file(folder, LINE_S)
    engine = BatchEngine(folder, free_ports(1)[0], TAKES)
    rows = []
    try:
        engine.start()
        upstream = f"http://127.0.0.1:{engine.port}"
        async with running_process(folder / "process", upstream, MODEL) as process:
            await create(process.api, await upload(process.api, path))
            for replicas in sizes:
                await engine.take(replicas * TAKES)
                await asyncio.sleep(SETTLE_S)
                rows.append(await row_of(engine, replicas))
    finally:
        engine.kill()
    return rows


async def row_of(engine: BatchEngine, replicas: int) -> list[str]:
    """Return what is in flight with some replicas, and whether that is enough."""
    seen = []
    for _ in range(int(WATCH_S / 0.5)):
        seen.append(await engine.asked("running"))
        await asyncio.sleep(0.5)
    most = replicas * SEQUENCES
    fed = statistics.fmean(min(most, running) for running in seen) / most
    judged = "met" if fed >= LEAST else "**missed**"
    return [str(replicas), str(most), f"{statistics.fmean(seen):.0f}", f"{fed:.2f} ({judged})"]


async def cost_of_lines(folder: Path) -> str:
    """Return what a line costs whose engine answers at once, in a sentence."""
    path = input_file(folder, 0.0)
    engine = BatchEngine(folder, free_ports(1)[0], 100_000)
    try:
        engine.start()
        upstream = f"http://127.0.0.1:{engine.port}"
        async with running_process(folder / "process", upstream, MODEL) as process:
            before_s = processor_s(process.pid)
            took_s, failed = await run_file(process.api, path)
            used_s = processor_s(process.pid) - before_s
    finally:
        engine.kill()
    return (
        f"**Lines that are answered at once:** {LINES} lines, of which {failed} failed, in {took_s:.1f} s, from the "
        f"creation of their batch to its end. A line costs the process {1000 * used_s / LINES:.2f} ms of a processor, "
        f"so one processor runs {LINES / used_s:.0f} lines a second. The engine shares the processors."
    )


def processor_s(pid: int) -> float:
    """Return the processor time of a process and all that it has started and that still runs."""
    parent = psutil.Process(pid)
    found = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(cpu.user + cpu.system + cpu.children_user + cpu.children_system for cpu in found)


def input_file(folder: Path, seconds: float) -> Path:
    """Write lines that each take so long, and return their path."""
    folder.mkdir()
    path = folder / "input.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            body = {"model": MODEL, "prompt": str(number), "max_tokens": 8, "seconds": seconds}
            line = {"custom_id": f"c-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


ABOUT: Final = f"""    python benchmarks/batch/feed.py

One key, one replica of the batch process with its default settings, and an engine that only waits: a line takes
{LINE_S:g} s, and more than {TAKES} lines for each replica get a 429 with `Retry-After: 1`. Lines in flight are the
mean of {WATCH_S:.0f} s, {SETTLE_S:.0f} s after replicas were added. Fed: the part of the sequences that have a line, at
least {LEAST}. Before: at most 256 lines in flight, so 4 replicas."""


if __name__ == "__main__":
    main()
