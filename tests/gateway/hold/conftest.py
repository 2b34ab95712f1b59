"""A gateway with parts in memory, as the tests of its request path have it, and a service without a replica."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from fleetkeeper_gateway.interfaces import Service
from tests.gateway.http.conftest import (
    client,
    idle_world,
    pytest_asyncio_loop_factories,
    upstream,
    world,
)
from tests.gateway.http.world import asleep, service

__all__ = ["client", "idle_world", "pytest_asyncio_loop_factories", "upstream", "world"]


@pytest.fixture
def free_port() -> int:
    """A port that refuses connections until the test listens on it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        name: tuple[str, int] = taken.getsockname()
    return name[1]


@pytest.fixture
def sleeper(free_port: int) -> Callable[..., Service]:
    """Returns a service that refuses connections, by the state of its sleep; None: awake."""

    def at(state: str | None = "Asleep", **changes: Any) -> Service:
        sleep = None if state is None else asleep(state=state, **changes)
        return service(url=f"http://127.0.0.1:{free_port}", sleep=sleep, demands_grant=True)

    return at
