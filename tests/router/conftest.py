"""The world of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.engine.router_world import RouterWorld, router_world
from tests.support.guards import GUARD_S


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RouterWorld]:
    """A service of stand-ins, without any yet."""
    async with router_world(tmp_path) as found:
        yield found


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without bounds of its own."""
    timeout = aiohttp.ClientTimeout(total=GUARD_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as found:
        yield found
