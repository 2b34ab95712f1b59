"""Redis, the API server and a process of the gateway end under load: requests continue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest

from fleetkeeper_contract import client_keys
from tests.support.gateway.gateway_api import KEYS_NAMESPACE, SECRETS, service
from tests.support.gateway.gateway_process import GatewayProcess
from tests.support.gateway.gateway_surroundings import SHARES, Surroundings
from tests.support.gateway.gateway_upstream import DONE

CLIENTS = 8
BOTH = 40
"""Requests of each phase: answered before the fault, and again after it began."""


@dataclass
class Load:
    """Clients that send one request after another, whole and streamed in turn."""

    world: Surroundings
    gateway: GatewayProcess
    statuses: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    stopped: bool = False

    async def client(self, number: int) -> None:
        """Send requests until the load stops."""
        streamed = bool(number % 2)
        while not self.stopped:
            try:
                status, answer = await self.world.ask(self.gateway, stream=streamed)
            except aiohttp.ClientError as problem:
                self.lost.append(repr(problem))
                return
            self.statuses[status] += 1
            if streamed and status == 200:
                assert answer.endswith(DONE)

    async def answers(self, count: int) -> None:
        """Wait until so many further requests were answered."""
        goal = self.statuses.total() + count
        await self.gateway.until(
            lambda: self.statuses.total() >= goal or self.lost, lambda: f"{self.statuses}"
        )
        assert not self.lost


@contextlib.asynccontextmanager
async def load(world: Surroundings, gateway: GatewayProcess) -> AsyncIterator[Load]:
    """Keep clients busy; at the end, wait for their last answers."""
    found = Load(world, gateway)
    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(found.client(number))
        try:
            yield found
        finally:
            found.stopped = True


@pytest.mark.promise("redis-gone")
async def test_requests_continue_when_redis_is_killed_and_comes_back(world: Surroundings) -> None:
    gateway = await world.start()
    async with load(world, gateway) as running:
        await running.answers(BOTH)
        world.redis.kill()
        await running.answers(BOTH)
        assert await gateway.metric("fleetkeeper_gateway_limits_shared") == 0
        await asyncio.to_thread(world.redis.start)
        await world.until_shared(gateway)
        await running.answers(BOTH)
    assert set(running.statuses) == {200}
    assert running.lost == []
    assert gateway.tracebacks() == []
    await world.at_rest(gateway)


@pytest.mark.exhaustive
async def test_requests_continue_when_redis_answers_nothing(world: Surroundings) -> None:
    """It accepts connections, which is worse than being away."""
    gateway = await world.start()
    async with load(world, gateway) as running:
        await running.answers(BOTH)
        world.redis.freeze()
        try:
            await running.answers(BOTH)
        finally:
            world.redis.thaw()
        await running.answers(BOTH)
    assert set(running.statuses) == {200}
    assert gateway.tracebacks() == []
    await world.at_rest(gateway)


@pytest.mark.promise("gateway-alone")
async def test_requests_continue_without_the_api_server(world: Surroundings) -> None:
    """And what changed in the meantime is known once it is back."""
    gateway = await world.start()
    async with load(world, gateway) as running:
        await running.answers(BOTH)
        await world.api.stop()
        await running.answers(BOTH)
        world.api.put(service("team-a", "second"))
        await world.api.start()

        async def known() -> bool:
            status, _ = await world.ask(gateway, model="second")
            return status == 200

        await gateway.until(known, "a service that was created in the meantime is not known")
        await running.answers(BOTH)
    assert set(running.statuses) == {200}
    assert gateway.tracebacks() == []


@pytest.mark.exhaustive
async def test_a_gateway_that_starts_without_the_api_server_serves_nobody(
    world: Surroundings,
) -> None:
    """It cannot know who is who, and it says so; then it serves, without a restart."""
    await world.api.stop()
    gateway = world.begin("early")

    async def refuses() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            status, _ = await world.ask(gateway)
            assert status == 503
            return True
        return False

    await gateway.until(refuses, "it does not answer")
    await world.api.start()
    await gateway.ready()
    assert (await world.ask(gateway))[0] == 200


@pytest.mark.promise("gateway-killed")
async def test_kill_9_of_one_process_leaves_the_others_requests_alone(world: Surroundings) -> None:
    """Both share the slots of a key in Redis. Streams of the dead one end visibly."""
    first, second = [await world.start(name, **SHARES) for name in ("first", "second")]
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(world.open(process, answer_as="hold", stream=True))
            for process in (first, second, first, second)
        ]
        await world.upstream.open(4)
        assert world.slots() == 4
        async with load(world, second) as running:
            await running.answers(BOTH)
            first.kill()
            await running.answers(BOTH)
        assert set(running.statuses) == {200}
        assert running.lost == []
        # The services learn of it at once, so they stop generating for nobody.
        await world.upstream.open(2)
        world.upstream.release()
        for number, answer in enumerate(streams):
            if number % 2:
                assert (await answer.read()).endswith(DONE)
            else:
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
    assert second.tracebacks() == []


@pytest.mark.promise("gateway-killed")
@pytest.mark.exhaustive
async def test_the_slots_of_a_killed_process_come_back(world: Surroundings) -> None:
    """By their lease: no process is left that could give them back."""
    key = world.add_key("two", **{client_keys.CONCURRENCY: "2"})
    first, second = [await world.start(name, **SHARES) for name in ("first", "second")]

    async def known() -> bool:
        return (await world.ask(second, key))[0] == 200

    await second.until(known, "the key is not known")
    async with world.open(first, key, answer_as="hold"), world.open(first, key, answer_as="hold"):
        await world.upstream.open(2)
        status, refusal = await world.ask(second, key)
        assert status == 429
        assert b'"concurrency"' in refusal
        first.kill()
        await second.until(known, "the slots of the killed process are still taken")


@pytest.mark.exhaustive
async def test_a_key_revoked_during_its_stream_ends_it(world: Surroundings) -> None:
    """Visibly, and the service learns of it; streams of other keys continue."""
    key = world.add_key("leaver")
    gateway = await world.start()
    async with (
        world.open(gateway, key, answer_as="hold", stream=True) as cut,
        world.open(gateway, answer_as="hold", stream=True) as kept,
    ):
        await world.upstream.open(2)
        world.api.delete(SECRETS, KEYS_NAMESPACE, "leaver")
        await world.upstream.open(1)
        with pytest.raises(aiohttp.ClientError):
            await cut.read()
        world.upstream.release()
        assert (await kept.read()).endswith(DONE)
    assert (await world.ask(gateway, key))[0] == 401
    await world.at_rest(gateway)


@pytest.mark.exhaustive
async def test_a_terminated_process_ends_its_streams_first(world: Surroundings) -> None:
    """New requests are refused or go nowhere, those that run end as they would have."""
    gateway = await world.start()
    async with world.open(gateway, answer_as="hold", stream=True) as answer:
        await world.upstream.open(1)
        ending = asyncio.create_task(gateway.stop())

        async def drains() -> bool:
            return '"event": "draining"' in gateway.log.read_text()

        await gateway.until(drains, "it does not drain")
        world.upstream.release()
        assert (await answer.read()).endswith(DONE)
    assert await ending == 0
    assert gateway.tracebacks() == []
