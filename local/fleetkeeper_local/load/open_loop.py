"""Open-loop load: planned arrivals sent at their times, and the outcome of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetkeeper_local.load.client import CompletionClient, Outcome
from fleetkeeper_local.load.schedule import Arrival

FIRST_PROMPT_TOKEN = 10
PROMPT_TOKEN_RANGE = 900


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


def prompt_of(arrival: Arrival) -> list[int]:
    """Return a prompt of exactly the planned number of tokens, different for each request.

    It consists of token ids, not text: lengths are exact, and no prefix cache can help.
    """
    return [
        FIRST_PROMPT_TOKEN + (arrival.number * 31 + position * 7) % PROMPT_TOKEN_RANGE
        for position in range(arrival.prompt_tokens)
    ]


async def run_open_loop(
    client: CompletionClient,
    arrivals: Sequence[Arrival],
    *,
    on_sample: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Send every arrival at its time and wait for all; return the samples in order of arrival."""
    loop = asyncio.get_running_loop()
    zero = loop.time()

    async def one(arrival: Arrival) -> Sample:
        await asyncio.sleep(max(0.0, zero + arrival.at_s - loop.time()))
        sent_s = loop.time() - zero
        outcome = await client.complete(
            prompt_of(arrival), arrival.output_tokens, tier=arrival.tier, session=arrival.session
        )
        sample = Sample(arrival, outcome, arrival.at_s, sent_s, loop.time() - zero)
        if on_sample is not None:
            on_sample(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(arrival)) for arrival in arrivals]
    return [task.result() for task in tasks]
