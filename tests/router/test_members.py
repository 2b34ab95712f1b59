"""Which replicas a router knows: those with an address that say that they are ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import aiohttp
import pytest

from fleetkeeper_router.settings import Policy
from tests.support.engine.router_world import Engine, Router, RouterWorld, post, until
from tests.support.guards import GUARD_S


async def chosen(session: aiohttp.ClientSession, router: Router) -> set[str]:
    """Return the replicas that get requests, by turns."""
    found = set()
    for _ in range(4 * len(router.members())):
        async with session.post(f"{router.url}/v1/completions", data=b"{}") as response:
            body = await response.json()
            found.add(str(body["from"] if response.status == 200 else body["error"]["code"]))
    return found


async def chooses(
    session: aiohttp.ClientSession, router: Router, engines: Iterable[Engine]
) -> None:
    """Wait until these replicas get requests, and no others."""
    wanted = {engine.address for engine in engines}

    async def are_chosen() -> bool:
        return await chosen(session, router) == wanted

    await router.knows(engines)
    await until(are_chosen)


async def test_a_hundred_replicas_are_known_and_all_replaced_at_once(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Their addresses need a DNS answer by TCP."""
    await world.add(100)
    router = await world.router(Policy.ROUND_ROBIN)
    assert world.dns.tcp_answers > 0
    await chooses(session, router, world.engines)
    old = list(world.engines)
    await world.add(100)
    for engine in old:
        engine.ready = False
    await chooses(session, router, world.engines[100:])
    await world.remove(*old)
    await chooses(session, router, world.engines)


async def test_a_replica_that_drains_gets_nothing_more(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Within its notice it still answers."""
    leaving, other = await world.add(2)
    router = await world.router(Policy.ROUND_ROBIN)
    leaving.ready = False
    began = time.monotonic()
    assert await chosen(session, router) <= {leaving.address, other.address}
    await chooses(session, router, [other])
    print(f"not chosen any more after {time.monotonic() - began:.2f} s")
    leaving.draining = True
    known = len(leaving.received)
    assert {await post(session, router) for _ in range(20)} == {other.address}
    assert len(leaving.received) == known


async def test_a_new_replica_serves_once_it_is_ready(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(1)
    router = await world.router(Policy.ROUND_ROBIN)
    (new,) = await world.add(1, ready=False)
    assert {await post(session, router) for _ in range(20)} == {world.engines[0].address}
    new.ready = True
    began = time.monotonic()
    await chooses(session, router, world.engines)
    print(f"chosen {time.monotonic() - began:.2f} s after it was ready")


async def test_a_replica_that_hangs_is_left_out(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Whether it stops answering about itself, or also its requests."""
    hung, other = await world.add(2)
    router = await world.router()
    hung.ready, hung.seconds = None, GUARD_S
    began = time.monotonic()
    await router.knows([other])
    print(f"left out after {time.monotonic() - began:.2f} s")
    assert {await post(session, router) for _ in range(20)} == {other.address}


async def test_a_busy_replica_that_answers_late_whether_it_is_ready_is_chosen(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """Two seconds late, as on a node whose processors all have work."""
    await world.add(1, ready_s=2.0)
    router = await world.router()
    assert await post(session, router) == world.engines[0].address


async def test_a_service_is_suspended_and_resumed(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(2)
    router = await world.router()
    await world.remove(*world.engines)
    await router.knows([])
    await chooses(session, router, await world.add(2))


async def test_one_question_every_three_seconds_is_all_that_the_dns_hears(
    world: RouterWorld,
) -> None:
    """All routers of a cluster ask the same servers, and a search list multiplies each question."""
    await world.add(2)
    await world.router()
    asked = world.dns.asked
    known = len(asked)

    async def has_asked() -> bool:
        return len(asked) >= known + 3

    await until(has_asked)
    assert {kind for _, kind in asked} == {1}
    assert asked[known + 2][0] - asked[known][0] >= 5.5


async def test_engines_that_were_known_stay_while_dns_is_away(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    await world.add(2)
    router = await world.router()
    asked = world.dns.queries
    world.dns.fails = True

    async def has_asked() -> bool:
        return world.dns.queries >= asked + 4

    await until(has_asked)
    assert await post(session, router)
    assert len(router.members()) == 2


@pytest.mark.parametrize("policy", list(Policy))
async def test_a_replica_killed_fails_only_what_it_had(
    world: RouterWorld, session: aiohttp.ClientSession, policy: Policy
) -> None:
    """Without the gateway: what meets a closed port goes to another replica."""
    engines = await world.add(4, seconds=0.02)
    router = await world.router(policy)
    failed: list[str] = []
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        headers = {"X-Session-ID": f"{number}", "X-Fleetkeeper-Prefix": f"{number}"}
        for _ in range(40):
            url = f"{router.url}/v1/completions"
            async with session.post(url, data=b"{}", headers=headers) as response:
                body = await response.json()
                if response.status != 200:
                    failed.append(body["error"]["code"])
            done += 1

    async def kill() -> int:
        victim: Engine = engines[0]
        async with asyncio.timeout(GUARD_S):
            while done < 200:  # noqa: ASYNC110 - a number has no event
                await asyncio.sleep(0.01)
        had = victim.running
        await victim.stop()
        return had

    killing = asyncio.create_task(kill())
    await asyncio.gather(*(client(number) for number in range(16)))
    had = await killing
    print(f"{policy}: {failed} of {done}; the replica had {had}")
    assert set(failed) <= {"replica_failed"}
    # Some began between the count and the end.
    assert len(failed) <= had + 16


async def test_a_router_has_started_when_an_engine_is_ready_for_it(
    world: RouterWorld, session: aiohttp.ClientSession
) -> None:
    """A new one that reaches none must not replace one that does. Later it stays ready without engines."""

    async def answers(router: Router, path: str) -> int:
        async with session.get(router.url + path) as response:
            return response.status

    (engine,) = await world.add(1, ready=False)
    router = await world.router()
    assert await answers(router, "/startup") == 503
    assert await answers(router, "/readiness") == 200
    world.dns.fails = True
    blind = await world.router()
    assert await answers(blind, "/startup") == 503
    world.dns.fails = False
    engine.ready = True
    for one in (router, blind):
        await one.knows([engine])
        assert await answers(one, "/startup") == 200
