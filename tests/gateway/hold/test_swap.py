"""Requests for a service whose only replica is replaced: the old replica takes them as long as it can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold.line import AWAKE_WAIT_S, PERIOD_S, Line
from fleetkeeper_gateway.interfaces import Service
from tests.gateway.hold.held import ask, held, hold_of
from tests.gateway.http.world import (
    KEY,
    StandIn,
    World,
    asleep,
    service,
)

LINE = f"Bearer batch.{KEY.id}.signed"
"""Token of the batch process on behalf of a key."""
DRAINING = '{"error": {"message": "...", "type": "server_error", "code": "draining"}}'
NO_REPLICA = '{"error": {"message": "...", "type": "server_error", "code": "no_replica"}}'
SWAPPING = asleep(state="Swapping", starts=(20, 40))


async def test_the_old_replica_gets_all_requests_at_once(idle_world: World) -> None:
    """It is not treated as one that has just started: nothing is held, for which there is no byte."""
    idle_world.hold = hold_of(idle_world, total_bytes=1)
    count, all_there = 50, asyncio.Event()
    async with idle_world.running() as world:

        async def script(_request: web.Request) -> web.StreamResponse:
            if len(world.upstream.received) == count:
                all_there.set()
            await all_there.wait()
            return web.Response(text="taken")

        world.upstream.script = script
        world.services.set(service(url=world.upstream.url, sleep=SWAPPING))
        statuses = await asyncio.gather(*(ask(world) for _ in range(count)))
    assert statuses == [200] * count


@pytest.mark.parametrize("text", [DRAINING, NO_REPLICA])
async def test_what_the_old_replica_does_not_take_is_held_for_the_new_one(
    world: World, text: str
) -> None:
    """Also what was on its way before the gateway saw that the service swaps. Nothing is marked."""
    awake = service(url=world.upstream.url)
    refusing = True

    async def script(_request: web.Request) -> web.StreamResponse:
        if not refusing:
            return web.Response(text="taken")
        world.services.set(service(url=world.upstream.url, sleep=SWAPPING))
        return web.Response(status=503, text=text)

    world.upstream.script = script
    world.services.set(awake)
    asking = [asyncio.create_task(ask(world)) for _ in range(5)]
    await world.until(lambda: held(world) == 5)
    asking.append(asyncio.create_task(ask(world)))
    await world.until(lambda: held(world) == 6)
    refusing = False
    assert await asyncio.gather(*asking) == [200] * 6
    assert world.marks.wanted == []
    assert [admission.released for admission in world.limiter.admissions] == [[True]] * 6


async def test_a_connection_that_is_refused_is_held(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    world.services.set(sleeper("Swapping"))
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: held(world) == 1)
    world.services.set(sleeper(None))
    async with StandIn().running(free_port) as late:
        assert await asking == 200
    assert len(late.received) == 1
    assert world.marks.wanted == []


async def test_a_request_that_was_sent_is_not_sent_again(world: World) -> None:
    """The old replica may have worked on it."""

    async def script(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    world.upstream.script = script
    world.services.set(service(url=world.upstream.url, sleep=SWAPPING))
    assert await world.refused() == (502, "upstream_failed")
    assert len(world.upstream.received) == 1


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", {"X_Inference_Tier": "batch"}),
        ("/v1/chat/completions", {"Authorization": LINE}),
        ("/v1/chat/completions", {"Authorization": LINE, "X_Fleetkeeper_Wake": "always"}),
        ("/tokenize", {}),
    ],
)
async def test_a_batch_and_a_tokenizer_are_served_and_not_held(
    world: World, sleeper: Callable[..., Service], path: str, headers: dict[str, str]
) -> None:
    world.services.set(service(url=world.upstream.url, sleep=SWAPPING))
    async with world.post(None, path, **headers) as response:
        assert response.status == 200
    world.services.set(sleeper("Swapping", starts=(20, 40)))
    async with world.post(None, path, **headers) as response:
        assert response.status == 503
        assert response.headers["X-Fleetkeeper-Refused"] == "service_asleep"
        assert 1 <= int(response.headers["Retry-After"]) <= 40
        text = await response.text()
    assert "replace" in text
    assert "sleep" not in text.replace("service_asleep", "")
    assert world.marks.wanted == []
    assert world.limiter.admissions[1].released == [False]


async def test_a_gateway_without_marks_holds_too(
    idle_world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """The operator ends a swap by itself."""
    idle_world.hold = hold_of(idle_world, marks=None)
    async with idle_world.running() as world:
        world.services.set(sleeper("Swapping"))
        asking = asyncio.create_task(ask(world))
        await world.until(lambda: held(world) == 1)
        async with StandIn().running(free_port):
            assert await asking == 200


async def test_the_end_of_the_hold_does_not_say_that_the_service_was_asleep(
    idle_world: World, sleeper: Callable[..., Service]
) -> None:
    idle_world.hold = hold_of(idle_world, hold_s=0.3)
    async with idle_world.running() as world:
        world.services.set(sleeper("Swapping"))
        async with world.post() as response:
            assert response.headers["X-Fleetkeeper-Refused"] == "service_waking"
            assert "sleep" not in await response.text()


async def test_a_swap_may_last_longer_than_an_awake_service_may_take_nothing() -> None:
    now = 100.0
    line = Line("team/chat", 10 * AWAKE_WAIT_S, now)
    waiter = line.join(Tier.STANDARD, "a", "m", now)
    while now < 100 + 5 * AWAKE_WAIT_S:
        line.step(now, service(sleep=SWAPPING), now - 100)
        assert waiter in line.trying, "it tries at once, and after each pause"
        line.refused(waiter, now, is_shed=False)
        now += PERIOD_S
    assert line.held == 1
