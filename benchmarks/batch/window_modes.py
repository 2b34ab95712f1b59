"""How a client sends lines: in windows, as many at a time as the batch tier takes, or all at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fleetkeeper_local.load.client import CompletionClient, Outcome, Patience
from fleetkeeper_local.load.closed_loop import closed_loop
from fleetkeeper_local.load.open_loop import Sample, run_open_loop
from fleetkeeper_local.load.schedule import Arrival

SIZES = (8, 16, 32, 64)
MAX_WAIT_S = 0.25
"""How long a window waits to fill."""
LINES_AT_A_TIME = 896
"""Of one key in one replica of the batch process: 7/8 of BATCH_CONCURRENCY."""
CONNECTIONS = 4096
"""More than ever wait, so that no request waits in the client for a connection."""
DEADLINE_S = 600.0
"""Only a hang lasts this long."""
PATIENT = Patience(attempts=1000, request_timeout_s=DEADLINE_S, deadline_s=DEADLINE_S)
"""A 429 is waited for, as the batch process does."""
UNLIMITED, TIER = "unlimited client", "batch tier"
Send = Callable[[Arrival], Awaitable[Outcome]]
Mode = Callable[[CompletionClient, Sequence[Arrival]], Awaitable[list[Sample]]]


def window(size: int) -> str:
    """Return the name of a mode."""
    return f"windows of {size}"


def patient_client(url: str, model: str) -> CompletionClient:
    """Return a client with as many connections as it needs."""
    return CompletionClient(f"{url}/v1", model, patience=PATIENT, connections=CONNECTIONS)


class Windows:
    """Requests that are collected, sent together, and answered when the last of them is.

    A window is sent once `size` requests wait, or `max_wait_s` after the first of them came. The next
    one is sent when the whole last one was answered.
    """

    def __init__(self, send: Send, size: int, max_wait_s: float) -> None:
        self._send = send
        self._size = size
        self._max_wait_s = max_wait_s
        self._waiting: asyncio.Queue[tuple[float, Arrival, asyncio.Future[Outcome]]] = (
            asyncio.Queue()
        )

    async def send(self, arrival: Arrival) -> Outcome:
        """Return the outcome of a request when its whole window was answered."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.put_nowait((loop.time(), arrival, answered))
        return await answered

    async def run(self) -> None:
        """Send windows until cancelled."""
        while True:
            first = await self._waiting.get()
            rows = [first]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(first[0] + self._max_wait_s):
                    while len(rows) < self._size:
                        rows.append(await self._waiting.get())
            outcomes = await asyncio.gather(*(self._send(arrival) for _, arrival, _ in rows))
            for (_, _, answered), outcome in zip(rows, outcomes, strict=True):
                answered.set_result(outcome)


def in_windows(size: int) -> Mode:
    """Return the mode that collects, sends together, and waits for all."""

    async def send(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Sample]:
        windows = Windows(client.send_whole, size, MAX_WAIT_S)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(windows.run())
            samples = await run_open_loop(windows.send, arrivals)
            sending.cancel()
        return samples

    return send


async def at_once(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Sample]:
    """Send every line at its time."""
    return await run_open_loop(client.send_whole, arrivals)


async def in_batch_tier(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Sample]:
    """Keep the lines of one replica of the batch process in the engine until none is left."""
    places = asyncio.Semaphore(LINES_AT_A_TIME)

    async def send(arrival: Arrival) -> Outcome:
        async with places:
            return await client.send_whole(arrival)

    return await run_open_loop(send, arrivals)


MODES: dict[str, tuple[str, Mode]] = {
    UNLIMITED: ("standard", at_once),
    TIER: ("batch", in_batch_tier),
    **{window(size): ("standard", in_windows(size)) for size in SIZES},
}
"""By name: the tier of the requests, and how they are sent."""


@dataclass
class Counts:
    """Lines, until now."""

    answered: int = 0
    failed: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one line."""
        self.answered += outcome.ok
        self.failed += not outcome.ok


@asynccontextmanager
async def full_queue(client: CompletionClient, lines: Sequence[Arrival]) -> AsyncIterator[Counts]:
    """Let lines of the batch tier always wait in the engine, until the block is left."""
    counts = Counts()
    async with closed_loop(
        client.send_whole, itertools.cycle(lines), LINES_AT_A_TIME, on_answer=counts.add
    ):
        yield counts
