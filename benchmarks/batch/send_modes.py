"""Two ways to send planned requests: each at its time, or collected into batches by the client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fleetkeeper_local.load.client import CompletionClient
from fleetkeeper_local.load.open_loop import prompt_of
from fleetkeeper_local.load.schedule import Arrival

CONNECTIONS = 4096
"""More than ever wait, so that no request waits in the client for a connection."""
TIMED_OUT = "timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: times in seconds since the start of its phase. `cause` is empty if it succeeded."""

    tier: str
    intended_s: float
    ended_s: float
    cause: str

    @property
    def latency_s(self) -> float:
        """Time from the intended send to the response."""
        return self.ended_s - self.intended_s


async def cause_of(client: CompletionClient, arrival: Arrival, deadline: float) -> str:
    """Send a request; return how it failed, or nothing. At the deadline the client hangs up."""
    try:
        async with asyncio.timeout_at(deadline):
            outcome = await client.complete(
                prompt_of(arrival), arrival.output_tokens, tier=arrival.tier, stream=False
            )
    except TimeoutError:
        return TIMED_OUT
    return outcome.cause


async def send_each(
    client: CompletionClient, arrivals: Sequence[Arrival], deadline_s: float
) -> list[Answer]:
    """Send every request at its time and wait for all."""
    loop = asyncio.get_running_loop()
    zero = loop.time()

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(zero + arrival.at_s - loop.time())
        cause = await cause_of(client, arrival, zero + arrival.at_s + deadline_s)
        return Answer(arrival.tier, arrival.at_s, loop.time() - zero, cause)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))


class StaticBatches:
    """Requests collected into batches. The next batch is sent when the whole last one was answered.

    A batch is sent once `size` requests wait, or `window_s` after the first of them. All its
    responses are passed on when the last has come.
    """

    def __init__(
        self, client: CompletionClient, size: int, window_s: float, deadline_s: float
    ) -> None:
        self._client = client
        self._size = size
        self._window_s = window_s
        self._deadline_s = deadline_s
        self._waiting: deque[Arrival] = deque()
        self._full = asyncio.Event()
        self._some = asyncio.Event()

    async def send(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Collect and send all requests; return when the last batch was answered."""
        zero = asyncio.get_running_loop().time()
        collecting = asyncio.create_task(self._collect(arrivals, zero))
        answers: list[Answer] = []
        while len(answers) < len(arrivals):
            await self._until_due(zero)
            answers += await self._send_batch(self._take(), zero)
        await collecting
        return answers

    async def _collect(self, arrivals: Sequence[Arrival], zero: float) -> None:
        loop = asyncio.get_running_loop()
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, zero + arrival.at_s - loop.time()))
            self._waiting.append(arrival)
            self._some.set()
            if len(self._waiting) >= self._size:
                self._full.set()

    async def _until_due(self, zero: float) -> None:
        """Wait until the batch is full, or until its first request waited for the window."""
        await self._some.wait()
        try:
            async with asyncio.timeout_at(zero + self._waiting[0].at_s + self._window_s):
                await self._full.wait()
        except TimeoutError:
            return

    def _take(self) -> list[Arrival]:
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < self._size:
            self._full.clear()
        return batch

    async def _send_batch(self, batch: Sequence[Arrival], zero: float) -> list[Answer]:
        """Send a batch without the requests whose clients hung up while they waited for it."""
        loop = asyncio.get_running_loop()
        due = [zero + arrival.at_s + self._deadline_s for arrival in batch]
        now = loop.time()
        sent = [arrival for arrival, at in zip(batch, due, strict=True) if at > now]
        causes = await asyncio.gather(
            *(cause_of(self._client, a, zero + a.at_s + self._deadline_s) for a in sent)
        )
        found = dict(zip((arrival.number for arrival in sent), causes, strict=True))
        ended = loop.time() - zero
        return [
            Answer(
                arrival.tier,
                arrival.at_s,
                min(ended, arrival.at_s + self._deadline_s),
                self._cause(found.get(arrival.number, TIMED_OUT), arrival, ended),
            )
            for arrival in batch
        ]

    def _cause(self, cause: str, arrival: Arrival, ended_s: float) -> str:
        """Return the cause of a request; it is answered only when its whole batch is."""
        if not cause and ended_s > arrival.at_s + self._deadline_s:
            return TIMED_OUT
        return cause
