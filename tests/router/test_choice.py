"""Which replica gets a request."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp

from fleetkeeper_router.settings import Policy
from tests.support.engine.router_world import Router, RouterWorld, post, until


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


async def test_a_replica_with_a_request_gets_another_one_rarely(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """The least loaded of three is chosen: it is chosen if all three are it, once in 64 times."""
    engines = await world.add(4)
    slow = engines[0]
    slow.hold = asyncio.Event()
    router = await world.router()
    requests: list[asyncio.Task[str]] = []
    for _ in range(200):
        requests.append(asyncio.create_task(post(session, router)))
        last, held = requests[-1], slow.running

        async def has_arrived(last: asyncio.Task[str] = last, held: int = held) -> bool:
            return last.done() or slow.running > held

        await until(has_arrived)
    print(f"{slow.running} of 200")
    # The first one, and three others. With two choices instead of three it would be 13.
    assert slow.running <= 16
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


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
