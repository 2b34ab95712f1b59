"""A Redis for each test, and queues that are closed at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gateway.batch.queue.world import World
from tests.support.services.redis_server import RedisServer, redis_server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty server that keeps every write."""
    with redis_server(
        tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always"
    ) as server:
        yield server


@pytest.fixture
async def world(redis: RedisServer) -> AsyncIterator[World]:
    """A Redis, and the queues of several processes."""
    found = World(redis)
    yield found
    await found.close()
