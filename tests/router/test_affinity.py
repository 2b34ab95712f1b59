"""Affinity: equal on all routers, and bounded by load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import aiohttp
import pytest

from fleetkeeper_router.settings import Policy
from tests.support.engine.router_world import Engine, Router, RouterWorld, post, until

KEYS = 1000


async def homes(session: aiohttp.ClientSession, router: Router) -> list[str]:
    headers = [{"X-Session-ID": f"session-{number}"} for number in range(KEYS)]
    return [await post(session, router, headers=one) for one in headers]


async def settled(
    session: aiohttp.ClientSession, router: Router, engines: Sequence[Engine]
) -> list[str]:
    """Return the replica of each session, once these replicas have them.

    One at a time: otherwise the bound on load moves some, as it should.
    """
    wanted = {engine.address for engine in engines}
    found: list[str] = []

    async def is_settled() -> bool:
        nonlocal found
        before, found = found, await homes(session, router)
        return set(found) == wanted and found == before

    await router.knows(engines)
    await until(is_settled)
    return found


async def test_two_routers_agree_after_replicas_and_a_router_were_replaced(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(6)
    one, two = [await world.router(Policy.SESSION_AFFINITY) for _ in range(2)]
    before = await settled(session, one, world.engines)
    kept = world.engines[3:]
    for old in world.engines[:3]:
        await world.add(1)
        await world.remove(old)
    await two.stop()
    await two.start()
    after = [await settled(session, router, world.engines) for router in (one, two)]
    assert after[0] == after[1]
    addresses = {engine.address for engine in kept}
    stayed = [old == new for old, new in zip(before, after[0], strict=True) if old in addresses]
    print(f"{sum(stayed)} of {len(stayed)} sessions of replicas that stayed are where they were")
    # Three new ones of nine in all take a third, from whomever.
    assert sum(stayed) > 0.5 * len(stayed)
    assert min(Counter(after[0]).values()) > KEYS / 6 / 3


@pytest.mark.parametrize(
    ("policy", "header"),
    [(Policy.SESSION_AFFINITY, "X-Session-ID"), (Policy.PREFIX_AWARE, "X-Fleetkeeper-Prefix")],
)
async def test_one_hot_key_spills_to_neighbors(
    world: RouterWorld, session: aiohttp.ClientSession, policy: Policy, header: str
) -> None:
    hold = asyncio.Event()
    engines = await world.add(3, hold=hold)
    router = await world.router(policy)

    async def client() -> None:
        url = f"{router.url}/v1/completions"
        async with session.post(url, data=b"{}", headers={header: "hot"}) as response:
            await response.read()

    clients: list[asyncio.Task[None]] = []

    async def all_run() -> bool:
        return sum(engine.running for engine in engines) == len(clients)

    for _ in range(60):
        # A request counts once it has a connection, so those of one moment do not know of one another.
        clients.append(asyncio.create_task(client()))
        await until(all_run)
    running = sorted(engine.running for engine in engines)
    print(running)
    hold.set()
    await asyncio.gather(*clients)
    assert running[-1] <= 60 / 3 * 1.5 + 1


async def test_a_replica_that_is_not_ready_gives_its_keys_to_others_alone(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(4)
    router = await world.router(Policy.SESSION_AFFINITY)
    before = await settled(session, router, world.engines)
    gone = world.engines[0]
    gone.ready = False
    after = await settled(session, router, world.engines[1:])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    others = [address for address in moved if address != gone.address]
    print(f"{len(others)} of {KEYS - before.count(gone.address)} keys of other replicas moved")
    assert len(others) < KEYS / 20
    gone.ready = True
    assert await settled(session, router, world.engines) == before
