"""Every admitted request makes progress at every allowed pair of limits, on a real vLLM."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside_engine import InsideEngine, client
from tests.support.shared_engine import shared_engine

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
    engine.free_all()
    async with client() as session:
        tasks = [asyncio.create_task(engine.stream(session, 160)) for _ in range(60)]
        await engine.until(lambda: sum(engine.scheduler().running) >= 55)
        engine.set_block(sequences=64, tokens=64)
        late = asyncio.create_task(engine.stream(session, 4, prompt=LONG_PROMPT))
        await engine.until(lambda: engine.scheduler().limit_tokens < 2048)
        block = engine.scheduler()
        assert block.limit_tokens >= sum(block.running)
        answers = await asyncio.gather(*tasks, late)
    assert [answer.tokens for answer in answers] == [160] * 60 + [4]
