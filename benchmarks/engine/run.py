"""Cost of live limits and tiers, and effect of the limits: on vLLM for CPU with the tiny model.

    .venv/bin/python benchmarks/engine/run.py switched     # one engine, alternately with and without our code
    .venv/bin/python benchmarks/engine/run.py inside       # CPU time of our code in a running engine
    .venv/bin/python benchmarks/engine/run.py added        # time a request spends in the middleware
    .venv/bin/python benchmarks/engine/run.py table        # sequences in a batch -> tok/s, waits, step time
    .venv/bin/python benchmarks/engine/run.py wide         # the same for every power of two up to 128

One call can name several. Each writes its figures into results.json next to this file, and its section of
RESULTS.md. On shared machines, `--lock FILE` holds a lock during each measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import accounted  # noqa: E402 - the path to inside_engine is set above
import limit_table  # noqa: E402
import with_and_without  # noqa: E402
from clients import CONCURRENCIES, warm_load  # noqa: E402
from cpu_share import CpuShare  # noqa: E402
from results_page import write_section  # noqa: E402

from fleetkeeper_engine.in_vllm.http.asgi import App, Message, Receive, Scope, Send  # noqa: E402
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware  # noqa: E402
from fleetkeeper_engine.shm.region import Region  # noqa: E402
from tests.support.engine.inside_engine import SETTINGS, THREADS, InsideEngine, client  # noqa: E402

INSIDE_ROUNDS = 5
ROUND_S = 5.0
ADDED_ROUNDS = 9
ADDED_FRAMES = 1000
FRAME = (
    b'data: {"id":"chatcmpl-9f1c2d3e4a5b6c7d8e9f0a1b2c3d4e5f","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
"""A frame as vLLM sends it for one token of a chat."""


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the lock, if there is one."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def inside(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Measure the CPU time of our code in one running engine, for each number of clients."""
    found: dict[str, Any] = {}
    with locked(lock):
        empty = await snapshots_of(directory, empty=True)
        for clients, snapshots in (await snapshots_of(directory, empty=False)).items():
            clock_ns = accounted.per_call_ns(empty[clients][0], empty[clients][-1])
            rounds = [
                accounted.figures_of(*pair, clock_ns) for pair in itertools.pairwise(snapshots)
            ]
            found[str(clients)] = {key: median(r[key] for r in rounds) for key in rounds[0]}
            print(f"{clients} clients:", found[str(clients)], flush=True)
    return found


async def snapshots_of(directory: Path, *, empty: bool) -> dict[int, list[accounted.Snapshot]]:
    """Return the sums before and after each round of one start, for each number of clients."""
    accounts = accounted.Accounts(directory / "accounts", empty=empty)
    engine = InsideEngine(directory, environment=accounts.environment)
    found: dict[int, list[accounted.Snapshot]] = {}
    try:
        async with client() as session:
            for clients in CONCURRENCIES:
                async with warm_load(engine, session, clients):
                    found[clients] = [accounts.snapshot(engine.cpu_s())]
                    for _ in range(INSIDE_ROUNDS):
                        await asyncio.sleep(ROUND_S)
                        found[clients].append(accounts.snapshot(engine.cpu_s()))
    finally:
        engine.stop()
        accounts.close()
    return found


async def switched(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Measure one engine, alternately with and without our code."""
    return await with_and_without.measure(directory, lambda: locked(lock))


async def added(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Measure one request and one frame in the middleware alone, around applications that respond at once."""
    region = Region.create(directory / "region")
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "x " * 500}], "max_tokens": 5}
    ).encode()

    async def application(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def stream(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _number in range(ADDED_FRAMES):
            await send({"type": "http.response.body", "body": FRAME, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    middleware = TierMiddleware(application, SETTINGS, region)
    streamed = TierMiddleware(stream, SETTINGS, region)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"x-inference-tier", b"realtime"), (b"x-request-id", b"1")],
        "client": ("10.0.0.1", 1),
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_: Message) -> None:
        return

    async def timed(app: App, calls: int = 4000) -> list[float]:
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            await app(scope, receive, send)
            times.append(time.perf_counter() - started)
        return times

    with locked(lock):
        rounds = [(await timed(middleware), await timed(application)) for _ in range(ADDED_ROUNDS)]
        frames = [(await timed(streamed, 40), await timed(stream, 40)) for _ in range(ADDED_ROUNDS)]
    inside = [median(ours) - median(bare) for ours, bare in rounds]
    high = [sorted(ours)[int(0.99 * len(ours))] for ours, _ in rounds]
    per_frame = [(median(ours) - median(bare)) / ADDED_FRAMES for ours, bare in frames]
    return {
        "p50_s": median(inside),
        "p99_s": median(high),
        "body_bytes": len(body),
        "frame_s": median(per_frame),
    }


async def table(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Measure limits up to the usual 64 sequences."""
    return await limit_table.measure(directory, lambda: locked(lock), limit_table.NARROW)


async def wide(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Measure every power of two up to 128 sequences."""
    return await limit_table.measure(directory, lambda: locked(lock), limit_table.WIDE)


def _inside(part: dict[str, Any]) -> str:
    return accounted.render(part, INSIDE_ROUNDS, ROUND_S)


def _added(part: dict[str, Any]) -> str:
    figures = part["figures"]
    return (
        "## Latency added by the middleware\n\n"
        f"A request with a body of {figures['body_bytes']} bytes, around an application that responds at "
        f"once: **{1e3 * figures['p50_s']:.3f} ms** at p50, {1e3 * figures['p99_s']:.3f} ms at p99. "
        f"A frame of a streamed answer: **{1e6 * figures['frame_s']:.1f} us**, which includes the counts of "
        f"TTFT and ITL.\n"
    )


def save(name: str, figures: dict[str, Any], cores: float | None) -> str:
    """Store the figures of a part; write its section of the page, and return it."""
    file = HERE / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results[name] = part = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[1],
        "threads": int(THREADS),
        **({} if cores is None else {"cores": cores}),
        "figures": figures,
    }
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    text = (
        f"{SECTIONS[name](part)}\nMeasured {part['measured']} on {part['machine']}, engines with "
        f"{part['threads']} thread(s); load average {part['load_average']:.1f}.\n"
    )
    heading, _, rest = text.removeprefix("## ").partition("\n")
    write_section(heading, rest, HERE / "RESULTS.md", TITLE)
    return text


TITLE = "# Fleetkeeper's code in the engine: cost and effect\n"
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "added": _added,
    "inside": _inside,
    "switched": with_and_without.render,
    "table": functools.partial(limit_table.render, sweep=limit_table.NARROW),
    "wide": functools.partial(limit_table.render, sweep=limit_table.WIDE),
}
PARTS = {
    "added": added,
    "inside": inside,
    "switched": switched,
    "table": table,
    "wide": wide,
}


def main() -> None:
    """Measure parts and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=list(PARTS))
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--cores", type=float, help="share of the machine to guarantee (root)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # A terminated measurement leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    share: contextlib.AbstractContextManager[CpuShare | None] = (
        contextlib.nullcontext() if arguments.cores is None else CpuShare(arguments.cores)
    )
    with share as group, tempfile.TemporaryDirectory() as name:
        if group is not None:
            group.enter()
        directory = Path(name)
        for part, measure in PARTS.items():
            if part in arguments.what:
                figures = asyncio.run(measure(directory, arguments.lock))
                print(save(part, figures, arguments.cores))


if __name__ == "__main__":
    main()
