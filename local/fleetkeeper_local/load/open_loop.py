"""Open-loop load: planned arrivals sent at their times, and the outcome of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.schedule import Arrival


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a run; times in seconds since the start of the run.

    `latency_s` and `first_token_s` count from `intended_s`, not from the actual send time.
    """

    arrival: Arrival
    outcome: Outcome
    intended_s: float
    sent_s: float
    ended_s: float

    @property
    def latency_s(self) -> float:
        """Time from the intended send to the last byte."""
        return self.ended_s - self.intended_s

    @property
    def first_token_s(self) -> float | None:
        """Time from the intended send to the first token, None without one."""
        if self.outcome.first_token_s is None:
            return None
        return self.outcome.first_token_s - self.outcome.started_s + self.sent_s - self.intended_s


async def run_open_loop(
    send: Callable[[Arrival], Awaitable[Outcome]],
    arrivals: Iterable[Arrival],
    *,
    on_send: Callable[[], None] | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    stop: asyncio.Event | None = None,
) -> list[Sample]:
    """Send every arrival at its time and wait for all; return the samples in order of arrival.

    Args:
        send: `send` of a client, or what is in front of it.
        arrivals: in order of time.
        on_send: called before each request.
        on_sample: called with each request that ended.
        stop: once it is set, no more are sent. Those under way end.
    """
    loop = asyncio.get_running_loop()
    zero = loop.time()
    stop = stop or asyncio.Event()
    tasks: list[asyncio.Task[Sample]] = []

    async def one(arrival: Arrival) -> Sample:
        sent_s = loop.time() - zero
        outcome = await send(arrival)
        sample = Sample(arrival, outcome, arrival.at_s, sent_s, loop.time() - zero)
        if on_sample is not None:
            on_sample(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(zero + arrival.at_s):
                    await stop.wait()
            if stop.is_set():
                break
            if on_send is not None:
                on_send()
            tasks.append(group.create_task(one(arrival)))
    return [task.result() for task in tasks]
