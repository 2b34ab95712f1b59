"""A gateway with parts in memory, as the tests of its request path have it."""

from tests.gateway.http.conftest import (
    client,
    idle_world,
    pytest_asyncio_loop_factories,
    upstream,
    world,
)

__all__ = ["client", "idle_world", "pytest_asyncio_loop_factories", "upstream", "world"]
