"""Every admitted request makes progress at every allowed pair of limits, on a real vLLM."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.support.engine.inside_engine import InsideEngine, client
from tests.support.engine.shared_engine import shared_engine

LONG_PROMPT = [10 + n % 900 for n in range(700)]

pytestmark = pytest.mark.timeout(900)
"""The first test waits for the shared engine to start."""


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> InsideEngine:
    found = shared_engine(request.config)
    await found.until_idle()
    return found


@pytest.mark.parametrize("sequences", [1, 8, 64])
async def test_long_and_short_requests_end_at_every_pair(
    engine: InsideEngine, sequences: int
) -> None:
    """Prompts longer than the step's tokens next to short ones, from the floor to the ceiling."""
    async with client() as session:
        for tokens in (64, 512, 2048):
            engine.set_block(sequences=sequences, tokens=tokens)
            answers = await asyncio.gather(
                engine.stream(session, 4, prompt=LONG_PROMPT),
                *(engine.stream(session, 6) for _ in range(4)),
                engine.stream(session, 4, prompt=LONG_PROMPT, tier="batch"),
            )
            assert [answer.tokens for answer in answers] == [4, 6, 6, 6, 6, 4]


async def test_the_tail_of_a_full_running_list_decodes_with_fewer_tokens_than_sequences(
    engine: InsideEngine,
) -> None:
    """60 run; then 64 tokens a step are wanted and a long prompt joins: all go on, no step starves."""
    joined = False
    answered: set[int] = set()

    async def come_again(session: aiohttp.ClientSession) -> None:
        while not joined:
            answered.add((await engine.stream(session, 160)).tokens)

    async with client() as session:
        # More clients than sequences: however late one comes back, another one waits for its place.
        engine.set_block(sequences=60, tokens=2048)
        tasks = [asyncio.create_task(come_again(session)) for _ in range(90)]
        await engine.until(lambda: sum(engine.scheduler().running) == 60)
        joined = True
        engine.set_block(sequences=64, tokens=64)
        late = asyncio.create_task(engine.stream(session, 4, prompt=LONG_PROMPT, tier="realtime"))
        await engine.until(lambda: engine.scheduler().limit_tokens < 2048)
        block = engine.scheduler()
        assert block.limit_tokens >= sum(block.running)
        await asyncio.gather(*tasks)
        assert (await late).tokens == 4
    assert answered == {160}
