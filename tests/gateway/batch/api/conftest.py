from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import openai
import pytest
import uvloop

from tests.support.batch.batch_api import ApiWorld


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The process's own loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def idle_world() -> ApiWorld:
    """An API that a test starts itself, with parts of its own."""
    return ApiWorld()


@pytest.fixture
async def world(idle_world: ApiWorld) -> AsyncIterator[ApiWorld]:
    """An API with default settings."""
    async with idle_world.running() as running:
        yield running


@pytest.fixture
async def client(world: ApiWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client with key `one`."""
    async with world.client() as opened:
        yield opened


@pytest.fixture
async def other(world: ApiWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client with key `two`."""
    async with world.client("two") as opened:
        yield opened
