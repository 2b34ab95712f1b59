"""Closed-loop load: clients that send one request after another, so that as many are always under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from fleetkeeper_local.load.schedule import Arrival

Answer = TypeVar("Answer")


async def run_closed_loop(
    send: Callable[[Arrival], Awaitable[Answer]],
    requests: Iterable[Arrival],
    clients: int,
    *,
    on_answer: Callable[[Answer], None],
    seconds: float | None = None,
) -> None:
    """Send requests in order, without regard to their times, until all are answered or the time is over.

    Requests under way at the end are dropped; the engine aborts them.
    """
    planned = iter(requests)

    async def client() -> None:
        for request in planned:
            on_answer(await send(request))

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())


@asynccontextmanager
async def closed_loop(
    send: Callable[[Arrival], Awaitable[Answer]],
    requests: Iterable[Arrival],
    clients: int,
    *,
    on_answer: Callable[[Answer], None],
) -> AsyncIterator[None]:
    """Run clients until the block is left. An error of theirs is raised then."""
    loop = asyncio.create_task(run_closed_loop(send, requests, clients, on_answer=on_answer))
    try:
        yield
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
