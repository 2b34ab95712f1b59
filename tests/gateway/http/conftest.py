from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
import pytest
import uvloop

from tests.gateway.http.world import StandIn, World
from tests.support.guards import GUARD_S


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The gateway's own loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that reports responses as they are."""
    timeout = aiohttp.ClientTimeout(total=GUARD_S)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        yield session


@pytest.fixture
async def upstream() -> AsyncIterator[StandIn]:
    """A service."""
    async with StandIn().running() as stand_in:
        yield stand_in


@pytest.fixture
async def idle_world(upstream: StandIn, client: aiohttp.ClientSession) -> World:
    """A gateway that a test starts itself, with settings of its own."""
    return World(upstream, client)


@pytest.fixture
async def world(idle_world: World) -> AsyncIterator[World]:
    """A gateway with default settings."""
    async with idle_world.running() as running:
        yield running
