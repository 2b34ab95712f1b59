"""What live limits and tiers cost, and what the limits do: on vLLM for CPU with the tiny model.

    .venv/bin/python benchmarks/engine/run.py throughput   # against stock vLLM, same flags, side by side
    .venv/bin/python benchmarks/engine/run.py inside       # processor time of our code in a running engine
    .venv/bin/python benchmarks/engine/run.py added        # time a request spends in the middleware
    .venv/bin/python benchmarks/engine/run.py table        # sequences in a batch -> tok/s, waits, step time

Several may be named in one call. Each writes its figures into results.json next to this file and RESULTS.md anew. `--lock FILE` holds a
lock while something is measured, for machines that are shared.
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
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

import accounted  # noqa: E402 - the path to the shared engine starter stands above
import aiohttp  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from turns import LONGEST_S, SHORTEST_S, taking_turns  # noqa: E402

from fleetkeeper_engine.asgi import App, Message, Receive, Scope, Send  # noqa: E402
from fleetkeeper_engine.middleware import TierMiddleware  # noqa: E402
from fleetkeeper_engine.page import Page  # noqa: E402
from inside_engine import SETTINGS, THREADS, InsideEngine, client  # noqa: E402

SIDES = {"stock": False, "again": False, "ours": True}
"""Engines that are compared, and whether our code is inside. The second stock one shows what is chance."""
STARTS = 5
"""One start of an engine differs from the next, for as long as it lives: by a hundredth or two, on a crowded host by ten."""
ROUNDS = 2
"""Of each start and number of clients."""
ROUND_S = 5.0
"""Of a round, by the clock of each engine."""
INSIDE_ROUNDS = 5
WARM_S = 3.0
ADDED_ROUNDS = 9
LOOK_S = 0.05
CONCURRENCIES = (1, 8, 32, 64)
"""Clients in a closed loop at each engine."""
TOKENS = (16, 48)
"""Of an answer, by dice that fall alike for every engine: with equal ones clients fall into step with
one another, in as many ways as there are starts, and that moves the rate more than anything measured."""
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
    engine: InsideEngine, session: aiohttp.ClientSession, clock: Callable[[], float], number: int
) -> AsyncIterator[tuple[float, float]]:
    """Asks again and again; when each request began and ended, by the engine's own clock."""
    body = {
        "model": "tiny",
        "prompt": list(range(20, 36)),
        "ignore_eos": True,
        "temperature": 0,
    }
    dice = random.Random(number)
    while True:
        tokens = dice.randint(*TOKENS)
        started = clock()
        request = {**body, "max_tokens": tokens}
        async with session.post(f"{engine.url}/v1/completions", json=request) as response:
            answer = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != tokens:
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
def running(directory: Path, sides: dict[str, bool]) -> Iterator[dict[str, InsideEngine]]:
    """Engines with and without our code inside, started together."""
    engines: dict[str, InsideEngine] = {}
    try:
        for name, ours in sides.items():
            engines[name] = InsideEngine(directory, ours=ours, wait=False)
        for engine in engines.values():
            engine.await_health()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


async def throughput(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Stock vLLM, stock vLLM once more, and ours, in turn several times a second; several starts of each."""
    found: dict[str, Any] = {str(clients): [] for clients in CONCURRENCIES}
    for start in range(STARTS):
        with locked(lock), running(directory, SIDES) as engines:
            async with client() as session:
                for clients in CONCURRENCIES:
                    rounds = await side_by_side(list(engines.values()), session, clients)
                    found[str(clients)].append(dict(zip(engines, rounds, strict=True)))
                    ratios = {
                        side: f"{ratio_of(found[str(clients)][-1], side):.3f}"
                        for side in ("again", "ours")
                    }
                    print(f"start {start + 1} of {STARTS}, {clients} clients:", ratios, flush=True)
    return found


async def side_by_side(
    engines: list[InsideEngine], session: aiohttp.ClientSession, clients: int
) -> list[list[dict[str, float]]]:
    """Of each engine: its figures of every round."""
    with taking_turns([engine.group for engine in engines]) as turns:
        loads = [
            Load(engine, session, clients, functools.partial(turns.clock, number))
            for number, engine in enumerate(engines)
        ]
        try:
            await asyncio.gather(*(load.next_round(WARM_S) for load in loads))
            rounds = [
                await asyncio.gather(*(load.next_round(ROUND_S) for load in loads))
                for _ in range(ROUNDS)
            ]
        finally:
            await asyncio.gather(*(load.end() for load in loads))
    return [list(of_engine) for of_engine in zip(*rounds, strict=True)]


def ratio_of(
    start: dict[str, list[dict[str, float]]], side: str, figure: str = "tokens_per_s"
) -> float:
    """A side's figure against stock's, of one start: the mean of its rounds against that of stock's.

    Our side is held against both stock engines, the second stock engine against the first.
    """
    against = ("stock", "again") if side == "ours" else ("stock",)
    own = fmean(found[figure] for found in start[side])
    return own / fmean(found[figure] for name in against for found in start[name])


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
        self._clients = [asyncio.create_task(self._ask(number)) for number in range(clients)]

    async def _ask(self, number: int) -> None:
        async for started, ended in one_client(self._engine, self._session, self._clock, number):
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


async def inside(directory: Path, lock: Path | None) -> dict[str, Any]:
    """Processor time of our code in one running engine, for each number of clients."""
    accounts = accounted.Accounts(directory / "accounts")
    found: dict[str, Any] = {}
    with locked(lock):
        engine = InsideEngine(directory, environment=accounts.environment)
        try:
            async with client() as session:
                for clients in CONCURRENCIES:
                    load = Load(engine, session, clients, time.perf_counter)
                    await load.next_round(WARM_S)
                    looks = [accounts.look(engine.cpu_s())]
                    for _ in range(INSIDE_ROUNDS):
                        await load.next_round(ROUND_S)
                        looks.append(accounts.look(engine.cpu_s()))
                    await load.end()
                    rounds = [accounted.figures_of(*pair) for pair in itertools.pairwise(looks)]
                    found[str(clients)] = {key: median(r[key] for r in rounds) for key in rounds[0]}
                    print(f"{clients} clients:", found[str(clients)], flush=True)
        finally:
            engine.stop()
            accounts.close()
    return found


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
        rounds = [(await timed(middleware), await timed(application)) for _ in range(ADDED_ROUNDS)]
    inside = [median(ours) - median(bare) for ours, bare in rounds]
    high = [sorted(ours)[int(0.99 * len(ours))] for ours, _ in rounds]
    return {"p50_s": median(inside), "p99_s": median(high), "body_bytes": len(body)}


async def table(directory: Path, lock: Path | None) -> dict[str, Any]:
    """One running engine; the limit is changed between windows, never the process."""
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in TABLE_SEQUENCES}
    with running(directory, {"ours": True}) as engines:
        async with client() as session:
            for number in range(TABLE_ROUNDS):
                with locked(lock):
                    for sequences, figures in (await one_round(engines["ours"], session)).items():
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
    for name, section in (
        ("throughput", _throughput),
        ("inside", _inside),
        ("added", _added),
        ("table", _table),
    ):
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
        f"## Against stock vLLM, same flags: {STARTS} starts, {ROUNDS} rounds of {ROUND_S:.0f} s each\n",
        (
            "Two stock engines and ours are loaded all the time and run in turn, for "
            f"{SHORTEST_S} to {LONGEST_S} s: two are halted while one runs, and rates and latencies are by a clock "
            "that stands while an engine is halted. So what else the machine does meets all. One start of an engine "
            "differs from the next; the figures are means over the starts with their standard error. Stock against "
            "stock is what chance does.\n"
        ),
        "| clients | stock tok/s | ours tok/s | **ours against stock** | stock against stock | processor time a token, ours against stock | stock p50 / p99 ms | ours p50 / p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for clients, starts in figures:
        rate, p50, p99 = (
            {side: median(r[key] for start in starts for r in start[side]) for side in SIDES}
            for key in ("tokens_per_s", "p50_s", "p99_s")
        )
        lines.append(
            f"| {clients} | {rate['stock']:.0f} | {rate['ours']:.0f} | **{_spread(starts, 'ours')}** "
            f"| {_spread(starts, 'again')} | {_spread(starts, 'ours', 'cpu_ms_per_token')} "
            f"| {1e3 * p50['stock']:.0f} / {1e3 * p99['stock']:.0f} | {1e3 * p50['ours']:.0f} / {1e3 * p99['ours']:.0f} |"
        )
    lines.append("\nTokens a second, ours against stock, each start:\n")
    for clients, starts in figures:
        ratios = sorted(ratio_of(start, "ours") for start in starts)
        lines.append(f"- {clients} clients: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return "\n".join(lines) + "\n"


def _inside(part: dict[str, Any]) -> str:
    return accounted.render(part, INSIDE_ROUNDS, ROUND_S)


def _spread(starts: list[Any], side: str, figure: str = "tokens_per_s") -> str:
    ratios = [ratio_of(start, side, figure) for start in starts]
    return f"{fmean(ratios):.3f} ± {stdev(ratios) / len(ratios) ** 0.5:.3f}"


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
    parser.add_argument("what", nargs="+", choices=["throughput", "inside", "added", "table"])
    parser.add_argument("--lock", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # An ended measurement leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parts = {"added": added, "inside": inside, "table": table, "throughput": throughput}
        for part, measure in parts.items():
            if part in arguments.what:
                save(part, asyncio.run(measure(directory, arguments.lock)))
    print((HERE / "RESULTS.md").read_text())


if __name__ == "__main__":
    main()
