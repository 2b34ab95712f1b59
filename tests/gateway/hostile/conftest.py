"""Surroundings of the tests against real processes of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway.gateway_surroundings import Surroundings, surroundings


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Surroundings]:
    """An API server, a service, Redis and a key; a test starts the processes."""
    async with surroundings(tmp_path) as found:
        yield found
