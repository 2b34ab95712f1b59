"""How long it takes until a queue that Redis has lost is repaired, with 50,000 lines.

    python benchmarks/batch/repair.py            # a minute; writes its section of RESULTS.md
    python benchmarks/batch/repair.py --quick    # a tenth of the lines; prints alone

The process is the one that is shipped, with a store on this disk. Its upstream does not exist, so all lines wait.
The logs of half of the chunks are closed. Then Redis is emptied, or killed and started without data, and the time
runs until all open chunks are queued again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import redis

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
from accept import NOWHERE  # noqa: E402 -- on the path set above
from real_process import ENDPOINT, RealProcess, create, running_process, upload  # noqa: E402
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_gateway.batch.model import MAX_LINES, Result  # noqa: E402 -- on the path set above
from fleetkeeper_gateway.batch.settings import BatchSettings  # noqa: E402
from fleetkeeper_gateway.batch.storage import create_storage  # noqa: E402

STREAMS: Final = "fleetkeeper:batch2:*:chunks"
HEADING: Final = "A queue that was lost"
TITLE: Final = "# Batches, measured\n"
MODEL: Final = "model"
GOAL_S: Final = 30.0
PATIENCE_S: Final = 300.0
BEFORE_S: Final = "1.46 s"
"""Of the queue by lines, without a store."""


def main() -> None:
    """Measure and print; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer lines; write nothing")
    args = parser.parse_args()
    lines = MAX_LINES // 10 if args.quick else MAX_LINES
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
        rows = asyncio.run(measure(Path(folder), lines))
    table = markdown_table(["Redis", "before", "repaired after", "at most"], rows)
    print(table)
    if not args.quick:
        write_section(HEADING, f"{ABOUT}\n\n{table}\n\n{measured_on()}", HERE / "RESULTS.md", TITLE)


async def measure(folder: Path, lines: int) -> list[list[str]]:
    """Return a row for each way to lose what Redis has."""
    path = folder / "input.jsonl"
    path.write_text("".join(map(line_text, range(lines))))
    async with running_process(folder / "process", NOWHERE, MODEL) as process:
        batch = await create(process.api, await upload(process.api, path))
        while batch.status == "validating":
            await asyncio.sleep(0.1)
            batch = await process.api.batches.retrieve(batch.id)
        still_open = await close_half(process, batch.id)
        rows = []
        for name, lose, before in (
            ("emptied", lambda: emptied(process), "-"),
            ("killed, and started empty", lambda: restarted(process), BEFORE_S),
        ):
            took_s = await repaired(process, lose, still_open)
            rows.append([name, before, f"{took_s:.2f} s", f"{GOAL_S:g} s"])
    return rows


def line_text(number: int) -> str:
    """Return a line of the input file."""
    body = {"model": MODEL, "prompt": "word " * 20, "max_tokens": 8}
    line = {"custom_id": f"c-{number}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line) + "\n"


async def close_half(process: RealProcess, batch_id: str) -> int:
    """Close the logs of every second chunk; return how many are open."""
    storage = create_storage(BatchSettings(batch_store=process.store, batch_store_shared=True))
    try:
        (record,) = [batch for batch in await storage.batches.active() if batch.id == batch_id]
        chunks = (await storage.batches.index(record)).chunks
        for number, lines in list(enumerate(chunks))[::2]:
            log = storage.batches.log(record, number, lines)
            await log.read()
            await log.append(results(lines), close=True)
        return len(chunks) // 2
    finally:
        storage.close()


def results(lines: Iterable[int]) -> list[Result]:
    """Return results as an engine's answers make them."""
    text = json.dumps({"custom_id": "c", "response": {"body": "word " * 100}}).encode()
    return [Result(number, True, text) for number in lines]


def emptied(process: RealProcess) -> None:
    """Empty Redis."""
    with process.redis.client() as client:
        client.flushall()


def restarted(process: RealProcess) -> None:
    """Kill Redis, which keeps nothing on the disk."""
    process.redis.kill()
    process.redis.start()


async def repaired(process: RealProcess, lose: Callable[[], None], least: int) -> float:
    """Lose what Redis has; return the seconds until so many chunks are queued."""
    await asyncio.to_thread(lose)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(queued, process) < least:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
    return time.monotonic() - began


def queued(process: RealProcess) -> int:
    """Return the chunks that Redis knows."""
    with suppress(redis.RedisError), process.redis.client() as client:
        return sum(int(client.xlen(name)) for name in client.scan_iter(STREAMS, count=1000))
    return 0


ABOUT: Final = """    python benchmarks/batch/repair.py

One batch of 50,000 lines, of which no line can be sent. The logs of every second chunk are closed. The time runs until
all open chunks are queued again. Before: the queue by lines, with its store in memory."""


if __name__ == "__main__":
    main()
