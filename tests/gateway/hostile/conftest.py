"""Surroundings of the tests against real processes of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway_world import GatewayWorld, gateway_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    """An API server, a service, Redis and a key; a test starts the processes."""
    async with gateway_world(tmp_path) as found:
        yield found
