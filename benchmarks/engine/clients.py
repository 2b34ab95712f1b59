"""Clients in a closed loop at one engine, and their measurements."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.inside_engine import InsideEngine

WARM_S = 3.0
POLL_S = 0.05
CONCURRENCIES = (1, 8, 32, 64)
"""Numbers of clients in a closed loop at each engine."""
TOKENS = (16, 48)
"""Length of a response, drawn alike for every engine. With equal lengths clients synchronize, in as
many ways as there are starts, and that changes the rate more than anything measured here."""


async def one_client(
    engine: InsideEngine, session: aiohttp.ClientSession, clock: Callable[[], float], number: int
) -> AsyncIterator[tuple[float, float]]:
    """Send requests one after the other; yield start and end of each by the engine's own clock."""
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
    """Return the number of tokens that an engine has generated since its start."""
    async with session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    for family in text_string_to_metric_families(text):
        for row in family.samples:
            if row.name == "vllm:generation_tokens_total":
                return float(row.value)
    raise RuntimeError(f"{engine.url}/metrics has no vllm:generation_tokens_total")


class Load:
    """Clients in a closed loop at one engine, and what they measured in a round."""

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
        """Return figures of the next seconds, by the engine's clock.

        Raises:
            RuntimeError: a response was not as requested.
        """
        self._latencies.clear()
        began, tokens, cpu_s = await self._counters()
        while self._clock() - began < seconds:
            await asyncio.sleep(POLL_S)
            for ended in (task for task in self._clients if task.done()):
                ended.result()
        latencies = sorted(self._latencies)
        over, tokens_now, cpu_s_now = await self._counters()
        return {
            "tokens_per_s": (tokens_now - tokens) / (over - began),
            "cpu_ms_per_token": 1e3 * (cpu_s_now - cpu_s) / (tokens_now - tokens),
            "p50_s": median(latencies),
            "p99_s": latencies[int(0.99 * len(latencies))],
        }

    async def _counters(self) -> tuple[float, float, float]:
        """Return the clock (halfway through the query), tokens and CPU time of the engine."""
        before = self._clock()
        tokens = await generated_tokens(self._engine, self._session)
        return (before + self._clock()) / 2, tokens, self._engine.cpu_s()

    async def end(self) -> None:
        """Stop the clients."""
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)


@asynccontextmanager
async def warm_load(
    engine: InsideEngine, session: aiohttp.ClientSession, clients: int
) -> AsyncIterator[Load]:
    """Run warmed-up clients until the block is left."""
    load = Load(engine, session, clients, time.perf_counter)
    try:
        await load.next_round(WARM_S)
        yield load
    finally:
        await load.end()
