"""How long it takes until a batch is accepted: its upload, its creation and its validation.

    python benchmarks/batch/accept.py            # prints a table
    python benchmarks/batch/accept.py --quick    # with files of a tenth of the size

The API, its store on this disk and the validation are those of the batch process; Redis has no part in
it. The client is OpenAI's own, in a process of its own on the same machine. The goal is 15 s for 50,000
lines of 200 MiB. The longest stop is that of the event loop that serves all other requests meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "serving")]
from results_page import markdown_table, measured_on  # noqa: E402 -- on the path set above

from fleetkeeper_gateway.batch.model import MAX_FILE_BYTES, MAX_LINES, BatchRecord  # noqa: E402
from fleetkeeper_gateway.batch.settings import BatchSettings  # noqa: E402
from fleetkeeper_gateway.batch.storage import create_storage  # noqa: E402
from fleetkeeper_gateway.batch.validation.validator import Validator  # noqa: E402
from fleetkeeper_gateway.limits import estimate_tokens  # noqa: E402
from tests.support.batch_api import ApiWorld  # noqa: E402

CLIENT = """
import json, sys, time
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="secret-of-one", max_retries=0)
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
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure smaller files")
    args = parser.parse_args()
    share = 10 if args.quick else 1
    rows = []
    for whole in INPUTS:
        one = replace(whole, bytes=whole.bytes // share, lines=max(1, whole.lines // share))
        with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
            rows.append(uvloop.run(measure(Path(folder), one)))
    head = ["file", "MiB", "lines", "upload s", "create s", "validate s", "all s", "stop ms"]
    print(measured_on())
    print(markdown_table(head, rows))
    print(f"Most memory of this process: {peak_mib():.0f} MiB")


def peak_mib() -> float:
    """Return the most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(folder: Path, one: Input) -> list[str]:
    """Return the row of a file."""
    path = folder / "input.jsonl"
    one.write(path)
    storage = create_storage(BatchSettings(batch_store=f"file://{folder}/store"))
    estimate = functools.partial(estimate_tokens, cap=1024)
    validator = Validator(storage.objects, storage.files, estimate)
    validations: list[asyncio.Task[None]] = []

    async def validate(record: BatchRecord) -> None:
        validated, lines = await validator.validate(record)
        await storage.batches.put_validated(record, validated, lines)

    world = ApiWorld()
    world.set(
        objects=storage.objects,
        files=storage.files,
        batches=storage.batches,
        on_created=lambda record: validations.append(asyncio.create_task(validate(record))),
    )
    # What lives long is not collected again, as in the process itself.
    gc.collect()
    gc.freeze()
    async with world.running():
        seconds, stop_s = await watched(run_client(world.url, path, one.endpoint))
    await asyncio.gather(*validations)
    storage.close()
    mib = path.stat().st_size / 2**20
    figures = [f"{one_s:.2f}" for one_s in seconds]
    return [one.name, f"{mib:.0f}", f"{one.lines}", *figures, f"{stop_s * 1e3:.0f}"]


async def run_client(url: str, path: Path, endpoint: str) -> list[float]:
    """Return the seconds of upload, creation, validation and all together, as a client sees them."""
    command = (sys.executable, "-c", CLIENT, url, str(path), endpoint)
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await client.communicate()
    if client.returncode != 0:
        raise SystemExit("the client failed")
    seconds: list[float] = json.loads(output)
    return seconds


async def watched(work: Awaitable[list[float]]) -> tuple[list[float], float]:
    """Return what a work returns, and the longest time in seconds in which the loop did nothing else."""
    working = asyncio.ensure_future(work)
    longest_s = 0.0
    while not working.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - began - 0.001)
    return await working, longest_s


if __name__ == "__main__":
    main()
