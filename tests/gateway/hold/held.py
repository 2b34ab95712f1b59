"""Requests that wait in a gateway with parts in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from fleetkeeper_gateway.hold import Hold
from tests.gateway.http.world import World
from tests.support.guards import GUARD_S


def hold_of(world: World, **changes: Any) -> Hold:
    """Returns a hold with other settings, for a gateway that was not started yet."""
    settings = {"hold_s": GUARD_S, "total_bytes": 64 * 1024**2, **changes}
    return Hold(world.services, settings.pop("marks", world.marks), **settings)


def held(world: World) -> int:
    return sum(line.held for line in world.hold._lines.values())


async def ask(world: World, **headers: str) -> int:
    async with asyncio.timeout(GUARD_S), world.post(None, **headers) as response:
        await response.read()
        return response.status
