"""How a client sends lines: in windows, as many at a time as the batch tier takes, or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from send_modes import CONNECTIONS, Answer, StaticBatches, cause_of, send_each

from fleetkeeper_local.load.client import CompletionClient, Patience
from fleetkeeper_local.load.schedule import Arrival

SIZES = (8, 16, 32, 64)
MAX_WAIT_S = 0.25
"""How long a window waits to fill."""
LINES_AT_A_TIME = 896
"""Of one key in one replica of the batch process: 7/8 of BATCH_CONCURRENCY."""
DEADLINE_S = 600.0
"""Only a hang lasts this long."""
PATIENT = Patience(attempts=1000, request_timeout_s=DEADLINE_S, deadline_s=DEADLINE_S)
"""A 429 is waited for, as the batch process does."""
UNLIMITED, TIER = "unlimited client", "batch tier"
Send = Callable[[CompletionClient, Sequence[Arrival]], Awaitable[list[Answer]]]


def window(size: int) -> str:
    """Return the name of a mode."""
    return f"windows of {size}"


def patient_client(url: str, model: str) -> CompletionClient:
    """Return a client with as many connections as it needs."""
    return CompletionClient(f"{url}/v1", model, patience=PATIENT, connections=CONNECTIONS)


def in_windows(size: int) -> Send:
    """Return the mode that collects, sends together, and waits for all."""

    async def send(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Answer]:
        return await StaticBatches(client, size, MAX_WAIT_S, DEADLINE_S).send(arrivals)

    return send


async def at_once(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Answer]:
    """Send every line at its time."""
    return await send_each(client, arrivals, DEADLINE_S)


async def in_batch_tier(client: CompletionClient, arrivals: Sequence[Arrival]) -> list[Answer]:
    """Keep the lines of one replica of the batch process in the engine until none is left."""
    loop = asyncio.get_running_loop()
    zero, places = loop.time(), asyncio.Semaphore(LINES_AT_A_TIME)

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(max(0.0, zero + arrival.at_s - loop.time()))
        async with places:
            cause = await cause_of(client, arrival, zero + arrival.at_s + DEADLINE_S)
        return Answer(arrival.tier, arrival.at_s, loop.time() - zero, cause)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))


MODES: dict[str, tuple[str, Send]] = {
    UNLIMITED: ("standard", at_once),
    TIER: ("batch", in_batch_tier),
    **{window(size): ("standard", in_windows(size)) for size in SIZES},
}
"""By name: the tier of the requests, and how they are sent."""


class FullQueue:
    """A context in which the engine always has lines of the batch tier that wait."""

    def __init__(self, client: CompletionClient, lines: Sequence[Arrival]) -> None:
        self._client = client
        self._lines = lines
        self._sent = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.answered = 0
        """Lines, until now."""
        self.failed = 0

    async def __aenter__(self) -> Self:
        """Begin to send."""
        self._tasks = [asyncio.create_task(self._send()) for _ in range(LINES_AT_A_TIME)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up, so that the engine drops what it has not finished."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            line = self._lines[self._sent % len(self._lines)]
            self._sent += 1
            if await cause_of(self._client, line, loop.time() + DEADLINE_S):
                self.failed += 1
            else:
                self.answered += 1
