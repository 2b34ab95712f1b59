"""Series of a service: few, whatever it answers, and gone with it."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from fleetkeeper_gateway import serve
from tests.gateway.http.world import World, service
from tests.support.guards import GUARD_S

NAME = "fleetkeeper_gateway_requests_total"


def counted(path: str) -> dict[str, float]:
    """Return the requests of a service by the status of their series."""
    return {
        sample.labels["status"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == NAME and sample.labels["service"] == path
    }


async def test_a_service_makes_few_series_and_takes_them_away(
    idle_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_FORGET_S", 0.05)
    statuses = iter([200, 200, 418, 451, 503, 598, 599, 208])

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(status=next(statuses), text="no")

    idle_world.upstream.script = script
    idle_world.services.set(service("counted", idle_world.upstream.url))
    async with idle_world.running() as world, asyncio.timeout(GUARD_S):
        for _ in range(8):
            async with world.post():
                pass
        await world.until(lambda: len(world.audit.requests) == 8)
        assert counted("team/counted") == {
            "200": 2,
            "4xx": 2,
            "503": 1,
            "5xx": 2,
            "2xx": 1,
        }
        world.services.set()
        await world.until(lambda: counted("team/counted") == {})
