"""Which replica gets a request."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp

from fleetkeeper_router.settings import Policy
from tests.support.router_world import Router, RouterWorld, post


async def spread(
    session: aiohttp.ClientSession, router: Router, count: int, at_once: int
) -> Counter[str]:
    """Send requests, so many at a time; return how many each engine answered."""
    found: Counter[str] = Counter()
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            found[await post(session, router)] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return found


async def test_a_replica_four_times_as_slow_gets_a_third_of_the_others(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    engines = await world.add(4, seconds=0.1)
    engines[0].seconds = 0.4
    router = await world.router()
    found = await spread(session, router, 1200, 32)
    print(sorted(found.items()))
    slow = found.pop(engines[0].address)
    # With equal numbers of requests it gets a quarter. Three are compared, not all.
    assert slow <= 0.4 * min(found.values())


async def test_a_full_replica_costs_no_client_a_429(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """It answers at once, so it always has the least requests."""
    full, _ = await world.add(2, seconds=0.1)
    full.slots = 0
    router = await world.router()
    found = await spread(session, router, 1024, 256)
    assert found[full.address] == 0
    assert sum(found.values()) == 1024


async def test_sessions_stay_at_their_replica(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(3)
    router = await world.router(Policy.SESSION_AFFINITY)
    for number in range(20):
        headers = {"X-Session-ID": f"s{number}"}
        found = {await post(session, router, headers=headers) for _ in range(5)}
        assert len(found) == 1


async def test_prefixes_stay_at_their_replica(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(3)
    router = await world.router(Policy.PREFIX_AWARE)
    seen = set()
    for number in range(20):
        system = f"{number}" * 1100
        bodies = [
            {"messages": [{"content": system}, {"content": f"turn {turn}"}]} for turn in range(5)
        ]
        found = {await post(session, router, body) for body in bodies}
        assert len(found) == 1
        seen |= found
    assert len(seen) > 1
    for engine in world.engines:
        for one in engine.received:
            assert one.header("X-Fleetkeeper-Prefix") is None
