"""What live limits and tiers cost, and what the limits do: on vLLM for CPU with the tiny model.

    .venv/bin/python benchmarks/engine/run.py throughput   # against stock vLLM, same flags, side by side
    .venv/bin/python benchmarks/engine/run.py added        # time a request spends in the middleware
    .venv/bin/python benchmarks/engine/run.py table        # sequences in a batch -> tok/s, waits, step time

Several may be named in one call; the engines are then started once.
Each writes its figures into results.json next to this file and RESULTS.md anew. `--lock FILE` holds a
lock while something is measured, for machines that are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

import aiohttp  # noqa: E402 - the path to the shared engine starter stands above
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from turns import LONGEST_S, SHORTEST_S, taking_turns  # noqa: E402

from fleetkeeper_engine.asgi import App, Message, Receive, Scope, Send  # noqa: E402
from fleetkeeper_engine.middleware import TierMiddleware  # noqa: E402
from fleetkeeper_engine.page import Page  # noqa: E402
from inside_engine import SETTINGS, THREADS, InsideEngine, client  # noqa: E402

ROUNDS = 9
ROUND_S = 8.0
"""Of a round, by the clock of each engine."""
WARM_S = 5.0
LOOK_S = 0.05
CONCURRENCIES = (1, 8, 32, 64)
"""Clients in a closed loop at each engine."""
TOKENS = 32
TABLE_SEQUENCES = (1, 4, 8, 16, 32, 64)
TABLE_ROUNDS = 5
TABLE_CLIENTS = 80
"""More than the highest limit, so that a place that comes free is taken at once."""
TABLE_TOKENS = 32
TABLE_WINDOW_S = 2.5
TABLE_STEPS = 40
PATIENCE_S = 900.0
"""Only a hang waits so long; a crowded machine must not end a measurement."""


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Holds the lock, if there is one."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def one_client(
    engine: InsideEngine, session: aiohttp.ClientSession, clock: Callable[[], float]
) -> AsyncIterator[tuple[float, float]]:
    """Asks again and again; when each request began and ended, by the engine's own clock."""
    body = {
        "model": "tiny",
        "prompt": list(range(20, 36)),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    while True:
        started = clock()
        async with session.post(f"{engine.url}/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != TOKENS:
            raise RuntimeError(f"status {response.status}: {answer}")
        yield started, clock()


async def generated_tokens(engine: InsideEngine, session: aiohttp.ClientSession) -> float:
    """Tokens that an engine has generated since its start."""
    async with session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    for family in text_string_to_metric_families(text):
        for row in family.samples:
            if row.name == "vllm:generation_tokens_total":
                return float(row.value)
    raise RuntimeError(f"{engine.url}/metrics has no vllm:generation_tokens_total")


@contextlib.contextmanager
def running(directory: Path, *kinds: bool) -> Iterator[dict[bool, InsideEngine]]:
    """Engines with and without our code inside, started together."""
    engines: dict[bool, InsideEngine] = {}
    try:
        for ours in kinds:
            engines[ours] = InsideEngine(directory, ours=ours, wait=False)
        for engine in engines.values():
            engine.await_health()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


async def throughput(engines: dict[bool, InsideEngine], lock: Path | None) -> dict[str, Any]:
    """Stock vLLM and ours, in turn, several times a second."""
    found: dict[str, Any] = {}
    async with client() as session:
        for clients in CONCURRENCIES:
            with locked(lock):
                found[str(clients)] = await side_by_side(engines, session, clients)
            print(clients, json.dumps(found[str(clients)]["summary"]), flush=True)
    return found


async def side_by_side(
    engines: dict[bool, InsideEngine], session: aiohttp.ClientSession, clients: int
) -> dict[str, Any]:
    """Medians over the rounds, and the median of the rounds' ratios."""
    rounds: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    sides = {ours: number for number, ours in enumerate(rounds)}
    with taking_turns([engines[ours].group for ours in sides]) as turns:
        loads = {
            ours: Load(engines[ours], session, clients, functools.partial(turns.clock, side))
            for ours, side in sides.items()
        }
        try:
            await asyncio.gather(*(load.next_round(WARM_S) for load in loads.values()))
            for _ in range(ROUNDS):
                measured = await asyncio.gather(
                    *(load.next_round(ROUND_S) for load in loads.values())
                )
                for ours, figures in zip(loads, measured, strict=True):
                    rounds[ours].append(figures)
        finally:
            await asyncio.gather(*(load.end() for load in loads.values()))
    summary = {
        f"{name}_{key}": median(r[key] for r in rounds[ours])
        for name, ours in (("stock", False), ("ours", True))
        for key in rounds[ours][0]
    }
    both = [rounds[False], rounds[True]]
    summary["ratio"] = median(paired(both))
    summary["cpu_ratio"] = median(paired(both, "cpu_ms_per_token"))
    return {"summary": summary, "rounds": both}


class Load:
    """Clients in a closed loop at one engine, and what they saw in a round."""

    def __init__(
        self,
        engine: InsideEngine,
        session: aiohttp.ClientSession,
        clients: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._session = session
        self._clock = clock
        self._latencies: list[float] = []
        self._clients = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        async for started, ended in one_client(self._engine, self._session, self._clock):
            self._latencies.append(ended - started)

    async def next_round(self, seconds: float) -> dict[str, float]:
        """Figures of the next seconds, by the engine's clock.

        Raises:
            RuntimeError: a request was not answered as asked.
        """
        self._latencies.clear()
        began, tokens, cpu_s = await self._look()
        while self._clock() - began < seconds:
            await asyncio.sleep(LOOK_S)
            for ended in (task for task in self._clients if task.done()):
                ended.result()
        latencies = sorted(self._latencies)
        over, tokens_now, cpu_s_now = await self._look()
        return {
            "tokens_per_s": (tokens_now - tokens) / (over - began),
            "cpu_ms_per_token": 1e3 * (cpu_s_now - cpu_s) / (tokens_now - tokens),
            "p50_s": median(latencies),
            "p99_s": latencies[int(0.99 * len(latencies))],
        }

    async def _look(self) -> tuple[float, float, float]:
        """The engine's clock, its tokens, its processor time; the clock at the middle of the question."""
        before = self._clock()
        tokens = await generated_tokens(self._engine, self._session)
        return (before + self._clock()) / 2, tokens, self._engine.cpu_s()

    async def end(self) -> None:
        """Ends the clients."""
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)


def paired(rounds: list[list[dict[str, float]]], figure: str = "tokens_per_s") -> list[float]:
    """Our figure against stock's of the same round."""
    stock, ours = rounds
    return [o[figure] / s[figure] for s, o in zip(stock, ours, strict=True)]


async def added(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Time of one request in the middleware alone, around an application that answers at once."""
    page = Page.create(directory / "page")
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "x " * 500}], "max_tokens": 5}
    ).encode()

    async def application(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    middleware = TierMiddleware(application, SETTINGS, page)
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

    async def timed(app: App) -> list[float]:
        times = []
        for _ in range(4000):
            started = time.perf_counter()
            await app(scope, receive, send)
            times.append(time.perf_counter() - started)
        return times

    with locked(lock):
        rounds = [(await timed(middleware), await timed(application)) for _ in range(ROUNDS)]
    inside = [median(ours) - median(bare) for ours, bare in rounds]
    high = [sorted(ours)[int(0.99 * len(ours))] for ours, _ in rounds]
    return {"p50_s": median(inside), "p99_s": median(high), "body_bytes": len(body)}


async def table(engines: dict[bool, InsideEngine], lock: Path | None) -> dict[str, Any]:
    """One running engine; the limit is changed between windows, never the process."""
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in TABLE_SEQUENCES}
    async with client() as session:
        for number in range(TABLE_ROUNDS):
            with locked(lock):
                for sequences, figures in (await one_round(engines[True], session)).items():
                    rounds[sequences].append(figures)
            print("round", number + 1, flush=True)
    return {
        str(sequences): {key: median(r[key] for r in found) for key in found[0]}
        for sequences, found in rounds.items()
    }


async def one_round(
    engine: InsideEngine, session: aiohttp.ClientSession
) -> dict[int, dict[str, float]]:
    """Every limit once, the clients always there."""
    over = False

    async def one_client() -> None:
        while not over:
            # Whole answers: a stream's chunks keep the HTTP side busier than the engine.
            answer = await engine.complete(session, TABLE_TOKENS)
            if answer.tokens != TABLE_TOKENS:
                raise RuntimeError(f"status {answer.status}")

    clients = [asyncio.create_task(one_client()) for _ in range(TABLE_CLIENTS)]
    found = {}
    for sequences in reversed(TABLE_SEQUENCES):
        engine.order(sequences=sequences)
        scheduled = sum(engine.scheduler().queue_wait_buckets)
        # Every client has come once under this limit: its wait is the limit's own.
        due = scheduled + TABLE_CLIENTS
        await engine.until(
            lambda due=due: sum(engine.scheduler().queue_wait_buckets) >= due,  # type: ignore[misc]
            PATIENCE_S,
        )
        found[sequences] = await window(engine)
    over = True
    engine.free_all()
    await asyncio.gather(*clients)
    return found


async def window(engine: InsideEngine) -> dict[str, float]:
    """What the engine says of a few seconds."""
    before, started = engine.scheduler(), time.perf_counter()
    await asyncio.sleep(TABLE_WINDOW_S)
    # A machine that is busy with something else may not take a step for seconds.
    least = before.worked_steps + TABLE_STEPS
    await engine.until(lambda: engine.scheduler().worked_steps >= least, PATIENCE_S)
    waits = sum(before.queue_wait_buckets)
    await engine.until(lambda: sum(engine.scheduler().queue_wait_buckets) > waits, PATIENCE_S)
    after, took = engine.scheduler(), time.perf_counter() - started
    steps = after.worked_steps - before.worked_steps
    waits = sum(after.queue_wait_buckets) - sum(before.queue_wait_buckets)
    return {
        "tokens_per_s": (after.generation_tokens - before.generation_tokens) / took,
        "batch_time_s": (after.batch_time_sum - before.batch_time_sum) / steps,
        "batch_sequences": (after.batch_sequences_sum - before.batch_sequences_sum) / steps,
        "queue_wait_s": (sum(after.queue_wait_sum) - sum(before.queue_wait_sum)) / waits,
    }


def render(results: dict[str, Any]) -> str:
    """The report: one section a part that was measured."""
    parts = ["# The engine's inside: what it costs, what it does\n"]
    parts.append(
        "vLLM 0.32.0 for CPU, the tiny model (3.1 M parameters, float32, eager), 64 sequences and 2,048 "
        "tokens at start-up, prefix caching off. Made by `benchmarks/engine/run.py`; single rounds are in "
        "`results.json`. Clients run on the same machine as the engine.\n"
    )
    for name, section in (("throughput", _throughput), ("added", _added), ("table", _table)):
        if name in results:
            part = results[name]
            parts.append(section(part))
            parts.append(
                f"Measured {part['measured']} on {part['machine']}, engines with {part['threads']} "
                f"thread(s); load average meanwhile {part['load_average']:.1f}.\n"
            )
    return "\n".join(parts)


def _throughput(part: dict[str, Any]) -> str:
    figures = sorted(part["figures"].items(), key=lambda item: int(item[0]))
    lines = [
        f"## Against stock vLLM, same flags, medians of {ROUNDS} rounds of {ROUND_S:.0f} s each\n",
        (
            f"Both are loaded all the time and run in turn, for {SHORTEST_S} to {LONGEST_S} s: one is halted "
            "while the other runs, and rates and latencies are by a clock that stands while an engine is "
            "halted. So what else the machine does meets both.\n"
        ),
        "| clients | stock tok/s | ours tok/s | ours against stock | stock p50 / p99 ms | ours p50 / p99 ms | processor time a token, ours against stock |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for clients, measured in figures:
        s = measured["summary"]
        lines.append(
            f"| {clients} | {s['stock_tokens_per_s']:.0f} | {s['ours_tokens_per_s']:.0f} | **{s['ratio']:.3f}** "
            f"| {1e3 * s['stock_p50_s']:.0f} / {1e3 * s['stock_p99_s']:.0f} "
            f"| {1e3 * s['ours_p50_s']:.0f} / {1e3 * s['ours_p99_s']:.0f} | {s['cpu_ratio']:.3f} |"
        )
    lines.append(
        "\nTokens a second, ours against stock (the median of the rounds' ratios), all rounds sorted:\n"
    )
    for clients, measured in figures:
        ratios = sorted(paired(measured["rounds"]))
        lines.append(f"- {clients} clients: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return "\n".join(lines) + "\n"


def _added(part: dict[str, Any]) -> str:
    figures = part["figures"]
    return (
        "## Added by the middleware\n\n"
        f"A request with a body of {figures['body_bytes']} bytes, around an application that answers at "
        f"once: **{1e3 * figures['p50_s']:.3f} ms** at p50, {1e3 * figures['p99_s']:.3f} ms at p99.\n"
    )


def _table(part: dict[str, Any]) -> str:
    figures = part["figures"]
    lines = [
        "## Sequences in a batch, changed while the engine runs\n",
        f"{part['clients']} clients, {TABLE_TOKENS} tokens a request; medians of {TABLE_ROUNDS} rounds.\n",
        "| limit | sequences in a step | tok/s | queue wait | batch time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for sequences, f in sorted(figures.items(), key=lambda item: int(item[0])):
        lines.append(
            f"| {sequences} | {f['batch_sequences']:.1f} | {f['tokens_per_s']:.0f} "
            f"| {f['queue_wait_s']:.3f} s | {1e3 * f['batch_time_s']:.1f} ms |"
        )
    gain = figures["64"]["tokens_per_s"] / figures["1"]["tokens_per_s"]
    return "\n".join(lines) + f"\n\n64 against 1: {gain:.1f} times the tokens a second.\n"


def save(name: str, figures: dict[str, Any]) -> None:
    """Keeps the figures of a part and writes the report anew."""
    file = HERE / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results[name] = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[1],
        "clients": TABLE_CLIENTS,
        "threads": int(THREADS),
        "figures": figures,
    }
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    (HERE / "RESULTS.md").write_text(render(results))


def main() -> None:
    """Measures parts and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=["throughput", "added", "table"])
    parser.add_argument("--lock", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # An ended measurement leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "added" in arguments.what:
            save("added", asyncio.run(added(directory, arguments.lock)))
        parts = {"table": (table, (True,)), "throughput": (throughput, (False, True))}
        wanted = [part for part in parts if part in arguments.what]
        kinds = max((parts[part][1] for part in wanted), key=len, default=())
        with running(directory, *kinds) as engines:
            for part in wanted:
                save(part, asyncio.run(parts[part][0](engines, arguments.lock)))
    print((HERE / "RESULTS.md").read_text())


if __name__ == "__main__":
    main()
