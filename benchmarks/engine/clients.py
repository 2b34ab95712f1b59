"""Clients in a closed loop at one engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from fleetkeeper_local.load.closed_loop import closed_loop
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals
from tests.support.engine.inside_engine import InsideEngine

WARM_S = 3.0
CONCURRENCIES = (1, 8, 32, 64)
"""Numbers of clients in a closed loop at each engine."""
TOKENS = (16, 48)
"""Range of the length of a response. With equal lengths clients synchronize, in as many ways as there
are starts, and that changes the rate more than anything measured here."""


@asynccontextmanager
async def clients_at(
    engine: InsideEngine,
    session: aiohttp.ClientSession,
    clients: int,
    tokens: tuple[int, int] = TOKENS,
) -> AsyncIterator[None]:
    """Run clients until the block is left.

    Raises:
        RuntimeError: a response was not as requested.
    """

    async def send(request: Arrival) -> None:
        # Not streamed: a stream's chunks would keep the HTTP side busier than the engine.
        answer = await engine.complete(session, request.output_tokens)
        if answer.tokens != request.output_tokens:
            raise RuntimeError(f"status {answer.status}: {answer.body!r}")

    shape = Shape(tiers={"standard": 1.0}, output_tokens=tokens)
    requests = itertools.cycle(plan_arrivals([Phase("load", 1000.0, 10.0)], shape, seed=1))
    async with closed_loop(send, requests, clients, on_answer=lambda _: None):
        yield


@asynccontextmanager
async def warm_load(
    engine: InsideEngine, session: aiohttp.ClientSession, clients: int
) -> AsyncIterator[None]:
    """Run warmed-up clients until the block is left."""
    async with clients_at(engine, session, clients):
        await asyncio.sleep(WARM_S)
        yield
