"""How long it takes until a batch is accepted: its upload, its creation and its validation.

    python benchmarks/batch/accept.py            # a minute; writes its section of RESULTS.md
    python benchmarks/batch/accept.py --quick    # with files of a tenth of the size; prints alone

The process is the one that is shipped, with a real Redis and its store on this disk. Its upstream does not exist, so
no line runs. The client is OpenAI's own, on the same machine. The goal is 15 s for 50,000 lines of 200 MiB. Beside
it another client asks for its batches again and again: the longest answer is what others notice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
from real_process import RealProcess, running_process  # noqa: E402 -- on the path set above
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_gateway.batch.model import MAX_FILE_BYTES, MAX_LINES  # noqa: E402

HEADING = "Accepting a batch"
TITLE = "# Batches, measured\n"
GOAL_S = 15.0
NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""
BEFORE_S = {"the largest": "1.30", "short lines": "0.59", "long lines": "1.55"}
"""Of the earlier API and validation, in one process."""

CLIENT = """
import json, sys, time
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[4], max_retries=0)
began = time.monotonic()
with open(sys.argv[2], "rb") as opened:
    file = client.files.create(file=opened, purpose="batch")
uploaded = time.monotonic()
batch = client.batches.create(
    input_file_id=file.id, endpoint=sys.argv[3], completion_window="24h")
created = time.monotonic()
while batch.status == "validating":
    time.sleep(0.05)
    batch = client.batches.retrieve(batch.id)
ended = time.monotonic()
assert batch.status == "in_progress", batch
print(json.dumps([uploaded - began, created - uploaded, ended - created, ended - began]))
"""


@dataclass(frozen=True)
class Input:
    """A file that is measured."""

    name: str
    endpoint: str
    bytes: int
    lines: int

    def write(self, path: Path) -> None:
        """Write the file: equal lines but for their IDs, with a prompt that fills them."""
        with path.open("wb") as file:
            for number in range(self.lines):
                line = {
                    "custom_id": f"request-{number:06}",
                    "method": "POST",
                    "url": self.endpoint,
                    "body": self.body(""),
                }
                empty = len(json.dumps(line)) + 1
                room = self.bytes // self.lines - empty
                line["body"] = self.body("word and " * (room // 9) + "x" * (room % 9))
                file.write(json.dumps(line).encode() + b"\n")

    def body(self, text: str) -> dict[str, object]:
        """Return the body of a line."""
        if self.endpoint == "/v1/embeddings":
            return {"model": "model", "input": text}
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        return {"model": "model", "max_tokens": 256, "messages": messages}


INPUTS = (
    Input("the largest", "/v1/chat/completions", MAX_FILE_BYTES, MAX_LINES),
    Input("short lines", "/v1/embeddings", MAX_LINES * 250, MAX_LINES),
    Input("long lines", "/v1/chat/completions", MAX_FILE_BYTES, 20),
)


def main() -> None:
    """Measure and print a table; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure smaller files; write nothing")
    args = parser.parse_args()
    share = 10 if args.quick else 1
    rows = []
    for whole in INPUTS:
        one = replace(whole, bytes=whole.bytes // share, lines=max(1, whole.lines // share))
        with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
            before = "-" if args.quick else BEFORE_S[one.name]
            rows.append(asyncio.run(measure(Path(folder), one, before)))
    head = ["file", "MiB", "lines", "upload s", "create s", "validate s", "all s", "before",
            "longest answer ms", "most memory MiB"]  # fmt: skip
    table = markdown_table(head, rows)
    print(table)
    if not args.quick:
        write_section(HEADING, f"{ABOUT}\n\n{table}\n\n{measured_on()}", HERE / "RESULTS.md", TITLE)


async def measure(folder: Path, one: Input, before: str) -> list[str]:
    """Return the row of a file."""
    path = folder / "input.jsonl"
    one.write(path)
    async with running_process(folder / "process", NOWHERE, "model") as process:
        beside = asyncio.create_task(longest_answer(process))
        memory = asyncio.create_task(most_memory(process.pid))
        seconds = await run_client(process, path, one.endpoint)
        for task in (beside, memory):
            task.cancel()
        longest_s, most = await asyncio.gather(beside, memory)
    mib = path.stat().st_size / 2**20
    figures = [f"{one_s:.2f}" for one_s in seconds]
    return [
        one.name,
        f"{mib:.0f}",
        f"{one.lines}",
        *figures,
        before,
        f"{longest_s * 1e3:.0f}",
        f"{most / 2**20:.0f}",
    ]


async def run_client(process: RealProcess, path: Path, endpoint: str) -> list[float]:
    """Return the seconds of upload, creation, validation and all together, as a client sees them."""
    command = (sys.executable, "-c", CLIENT, process.url, str(path), endpoint, process.key)
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await client.communicate()
    if client.returncode != 0:
        raise SystemExit("the client failed")
    seconds: list[float] = json.loads(output)
    return seconds


async def longest_answer(process: RealProcess) -> float:
    """Ask for batches until this is cancelled; return the longest time of an answer in seconds."""
    longest_s = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            began = time.monotonic()
            await process.api.batches.list(limit=1)
            longest_s = max(longest_s, time.monotonic() - began)
            await asyncio.sleep(0.02)
    return longest_s


async def most_memory(pid: int) -> int:
    """Watch the process and all that it starts until this is cancelled; return its most bytes."""
    most = 0
    with suppress(asyncio.CancelledError):
        while True:
            most = max(most, await asyncio.to_thread(memory_of, pid))
            await asyncio.sleep(0.1)
    return most


def memory_of(pid: int) -> int:
    """Return the bytes of a process and of all that it started. What they share counts once."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            total += process.memory_full_info().pss
    return total


ABOUT = f"""    python benchmarks/batch/accept.py

The shipped process with Redis and a store on the disk of the machine that the client uses too. The goal is
{GOAL_S:.0f} s for 50,000 lines of 200 MiB. The longest answer is that of another client, which lists its batches
meanwhile. Memory is that of all processes. Before: the API and the validation of the earlier form, in one process."""


if __name__ == "__main__":
    main()
