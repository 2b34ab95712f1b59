"""Requests with a seed on a real vLLM: prompts that are computed in several steps end nothing and change no answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.support.engine.inside_engine import MODEL, InsideEngine, client
from tests.support.engine.shared_engine import shared_engine

SEED = 7
TOKENS = 24
SHORT = [9, 8, 7, 6, 5]
LONG = [5 + number % 997 for number in range(600)]
LONGER = [11 + number % 991 for number in range(900)]
PROMPTS = [SHORT, LONG, LONGER]
STEP_TOKENS = 256
"""The limit under which LONG takes three steps and LONGER four, while SHORT decodes."""

pytestmark = [pytest.mark.timeout(900), pytest.mark.exhaustive]
"""The first test waits for the shared engine to start."""


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> InsideEngine:
    found = shared_engine(request.config)
    found.free_all()
    await found.until_idle()
    return found


async def answers(
    engine: InsideEngine, session: ClientSession, prompts: list[list[int]], **body: object
) -> list[list[int]]:
    """The tokens of one completion for each prompt."""
    asked = {
        "model": MODEL,
        "prompt": prompts,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 1,
        "return_token_ids": True,
        **body,
    }
    async with session.post(f"{engine.url}/v1/completions", json=asked) as response:
        found: dict[str, Any] = await response.json()
        assert response.status == 200, found
        return [choice["token_ids"] for choice in found["choices"]]


async def answer_and_steps(
    engine: InsideEngine, session: ClientSession, seed: int
) -> tuple[list[int], int]:
    """The answer to LONG and the steps that it took; nothing else runs."""
    before = engine.scheduler()
    [answer] = await answers(engine, session, [LONG], seed=seed)
    # Steps are counted late.
    expected = before.generation_tokens + TOKENS
    await engine.until(lambda: engine.scheduler().generation_tokens == expected)
    return answer, engine.scheduler().worked_steps - before.worked_steps


async def test_a_seeded_answer_is_the_same_whatever_number_of_steps_its_prompt_takes(
    engine: InsideEngine,
) -> None:
    """Another seed gives another answer, so it is the seed that makes them equal."""
    async with client() as session:
        whole, steps = await answer_and_steps(engine, session, SEED)
        other, _ = await answer_and_steps(engine, session, SEED + 1)
        engine.set_block(tokens=STEP_TOKENS)
        parts, more_steps = await answer_and_steps(engine, session, SEED)
    assert more_steps == steps + 2
    assert len(whole) == TOKENS
    assert parts == whole != other


async def test_who_shares_steps_with_a_seeded_prompt_in_parts_gets_the_answer_it_gets_alone(
    engine: InsideEngine,
) -> None:
    """Decodes beside it, other prompts in parts, greedy ones and such without a seed."""
    async with client() as session:
        alone = [(await answers(engine, session, [one], seed=SEED))[0] for one in PROMPTS]
        greedy = await answers(engine, session, PROMPTS, temperature=0)
        engine.set_block(tokens=STEP_TOKENS)
        seeded, beside, free = await asyncio.gather(
            answers(engine, session, PROMPTS, seed=SEED),
            answers(engine, session, PROMPTS, temperature=0),
            answers(engine, session, PROMPTS),
        )
    assert seeded == alone
    assert beside == greedy
    assert [len(answer) for answer in free] == [TOKENS] * len(PROMPTS)
