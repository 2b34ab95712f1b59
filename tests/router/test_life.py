"""A router starts, is observed, and ends without cutting a stream."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from fleetkeeper_router.drain import running
from fleetkeeper_router.settings import PREFIX
from tests.support.engine.router_world import RouterWorld, post, until
from tests.support.guards import GUARD_S


async def test_streams_end_by_themselves_when_a_router_ends(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    hold = asyncio.Event()
    (engine,) = await world.add(1, hold=hold)
    router = await world.router(notice_seconds=0.5)
    async with session.post(f"{router.url}/v1/completions", data=b"{}") as stream:
        await stream.content.readline()
        drain = await router.command("drain")
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    async with session.get(f"{router.url}/readiness") as response:
                        # Within the notice it answers, and closes the connection with it.
                        if response.status != 200:
                            assert response.headers["Connection"] == "close"
                except aiohttp.ClientConnectorError:
                    break
                await asyncio.sleep(0.05)
        assert drain.returncode is None, "it waits for the stream"
        hold.set()
        assert (await stream.content.read()).endswith(b"data: two\n\n")
    assert await drain.wait() == 0
    await router.stop()
    assert engine.cancelled == 0


async def test_a_drain_ends_after_its_time(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(1, hold=asyncio.Event())
    router = await world.router(drain_seconds=0.5)
    async with session.post(f"{router.url}/v1/completions", data=b"{}") as stream:
        await stream.content.readline()
        assert running(router.admin) == 1
        drain = await router.command("drain")
        async with asyncio.timeout(GUARD_S):
            assert await drain.wait() == 0
        assert "1 requests still run after 0.5 s" in router.log.read_text()


async def test_a_drain_without_a_router_says_so(world: RouterWorld) -> None:
    await world.add(1)
    router = await world.router()
    await router.stop()
    drain = await router.command("drain")
    assert await drain.wait() == 1
    assert "Envoy does not answer" in router.log.read_text()


async def test_metrics_have_no_series_for_each_replica(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(3)
    router = await world.router()
    await post(session, router)
    address = f"http://127.0.0.1:{router.environment[PREFIX + 'METRICS_PORT']}"

    async def page() -> str:
        async with session.get(f"{address}/metrics") as response:
            assert response.status == 200
            return await response.text()

    few = await page()
    assert 'envoy_cluster_upstream_rq_total{envoy_cluster_name="engines"} 1' in few
    assert 'envoy_cluster_membership_healthy{envoy_cluster_name="engines"} 3' in few
    await world.add(20)
    await router.knows(world.engines)
    many = await page()
    count = [sum(not line.startswith("#") for line in text.splitlines()) for text in (few, many)]
    print(f"{count} series")
    assert count[1] - count[0] < 20
    assert count[1] < 400
    # The rest of the admin interface changes the router.
    for path in ("/", "/quitquitquit", "/stats", "/config_dump"):
        async with session.post(f"{address}{path}") as response:
            assert response.status == 404, path


async def test_a_connection_is_closed_before_the_engine_closes_it(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Otherwise a request may meet the end of its connection, and may have been received or not."""
    (engine,) = await world.add(1, keep_alive_s=3600.0)
    router = await world.router()
    assert await post(session, router)
    assert engine.connections == 1
    began = time.monotonic()

    async def is_closed() -> bool:
        return engine.connections == 0

    await until(is_closed)
    print(f"closed after {time.monotonic() - began:.2f} s")
