"""A Redis for each test, and limiters that are closed at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.gateway.limits_world import Replicas
from tests.support.services.redis_server import RedisServer, redis_server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty server."""
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    """Starts limiters."""
    found = Replicas()
    yield found
    for replica in found.all:
        await replica.limiter.close()
