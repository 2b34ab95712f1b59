"""A running vLLM with Fleetkeeper's code: loads are sent to it, and it is measured."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from replayed_load import Ended, Figures, Reading, figures_of, sums_of

from fleetkeeper_contract.step_terms import StepClass
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.layout import MiddlewareBlock
from fleetkeeper_local.load.open_loop import prompt_of
from fleetkeeper_local.load.schedule import Arrival
from tests.support.inside_engine import InsideEngine

READ_EVERY_S: Final = 10.0
"""A window of the control loop."""


@dataclass
class Measured:
    """A load as the engine and the client saw it."""

    figures: Figures
    engine_ttft_s: float
    engine_itl_s: float
    late_s: float
    readings: list[Reading] = field(default_factory=list)


class RealEngine:
    """A running engine that loads are sent to."""

    def __init__(self, engine: InsideEngine, session: aiohttp.ClientSession) -> None:
        self._engine = engine
        self._session = session
        self._zero = 0.0

    @property
    def kv_capacity_tokens(self) -> float:
        """The tokens that its KV cache holds."""
        return float(self._engine.scheduler().kv_capacity_tokens)

    async def open_loop(self, arrivals: Sequence[Arrival]) -> Measured:
        """Send requests at their times; return when all have ended."""
        before = await self._start()
        readings = [self._reading()]
        late: list[float] = []

        async def one(arrival: Arrival) -> Ended:
            await asyncio.sleep(max(0.0, arrival.at_s - self._now()))
            late.append(self._now() - arrival.at_s)
            return await self._ask(arrival)

        reader = asyncio.create_task(self._read(readings))
        try:
            ended = await asyncio.gather(*(one(arrival) for arrival in arrivals))
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        await self._engine.until_idle()
        readings.append(self._reading())
        span_s = (0.0, max(row.ended_s for row in ended))
        figures = figures_of(readings[0], readings[-1], ended, span_s)
        return self._measured(
            figures, before, await self._engine.middleware_now(), max(late), readings
        )

    async def closed_loop(
        self, arrivals: Sequence[Arrival], clients: int, span_s: tuple[float, float]
    ) -> Measured:
        """Keep one request of each client in flight until the span ends; the last ones are not waited for.

        Raises:
            ValueError: the planned requests do not last that long.
        """
        await self._start()
        planned, ended = iter(arrivals), list[Ended]()
        begin, end = span_s

        async def one() -> None:
            while self._now() < end:
                arrival = next(planned, None)
                if arrival is None:
                    raise ValueError(f"{len(arrivals)} requests do not last {end:.0f} s")
                ended.append(await self._ask(arrival))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one())
            await asyncio.sleep(begin - self._now())
            middleware, first = await self._engine.middleware_now(), self._reading()
            await asyncio.sleep(end - self._now())
            middleware_after, last = await self._engine.middleware_now(), self._reading()
        figures = figures_of(first, last, ended, span_s)
        return self._measured(figures, middleware, middleware_after, 0.0, [])

    async def _start(self) -> MiddlewareBlock:
        await self._engine.until_idle()
        before = await self._engine.middleware_now()
        self._zero = asyncio.get_running_loop().time()
        return before

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._zero

    async def _ask(self, arrival: Arrival) -> Ended:
        sent_s = self._now()
        answer = await self._engine.stream(
            self._session, arrival.output_tokens, prompt=prompt_of(arrival)
        )
        if answer.tokens != arrival.output_tokens:
            raise RuntimeError(
                f"request {arrival.number}: status {answer.status}, {answer.tokens} tokens"
            )
        first, last = (answer.times[place] - self._zero for place in (0, -1))
        return Ended(sent_s, first, last, answer.tokens)

    async def _read(self, readings: list[Reading]) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, number * READ_EVERY_S - self._now()))
            readings.append(self._reading())

    def _reading(self) -> Reading:
        block = self._engine.scheduler()
        return Reading(
            at_s=self._now(),
            requests=float(sum(block.queue_wait_buckets)),
            wait_s=sum(block.queue_wait_sum),
            steps=float(sum(block.batch_time_buckets)),
            steps_s=block.batch_time_sum,
            sequences=block.batch_sequences_sum,
            decode=sums_of(block.step_model, StepClass.DECODE),
            prefill=sums_of(block.step_model, StepClass.PREFILL),
        )

    def _measured(
        self,
        figures: Figures,
        before: MiddlewareBlock,
        after: MiddlewareBlock,
        late_s: float,
        readings: list[Reading],
    ) -> Measured:
        tier = Tier.STANDARD
        first = sum(after.time_to_first_token_of(tier)) - sum(before.time_to_first_token_of(tier))
        gaps = sum(after.inter_token_latency_of(tier)) - sum(before.inter_token_latency_of(tier))
        return Measured(
            figures,
            (after.time_to_first_token_sum[tier] - before.time_to_first_token_sum[tier]) / first,
            (after.inter_token_latency_sum[tier] - before.inter_token_latency_sum[tier]) / gaps,
            late_s,
            readings,
        )
