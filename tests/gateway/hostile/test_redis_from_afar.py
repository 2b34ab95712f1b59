"""A Redis that answers late, and one that is reached by TLS with a password, as `serve` meets them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest
import redis

from fleetkeeper_contract import client_keys
from fleetkeeper_gateway.limits import Timing
from tests.support.gateway.gateway_api import key_secret
from tests.support.gateway.gateway_process import GatewayProcess
from tests.support.gateway.gateway_surroundings import NAMESPACE, Surroundings, new_key
from tests.support.guards import GUARD_S
from tests.support.services.redis_server import RedisServer, RedisTls, redis_server
from tests.support.services.slow_proxy import SlowProxy

WITHIN_S = 0.05
"""A request continues within this time, whatever Redis does."""
TRIES = range(2, 20)
"""At least and at most: a busy machine may delay many of them, so the best one counts."""
LOCAL = "limits are local to this replica: Redis does not answer"
SHARED = "limits are shared: Redis answers"


def events(gateway: GatewayProcess) -> list[str]:
    """Return the events of the log about where limits are."""
    lines = [line for line in gateway.log.read_text().splitlines() if '"event": "limits ' in line]
    return [json.loads(line)["event"] for line in lines]


async def seconds_of(world: Surroundings, gateway: GatewayProcess, key: str) -> float:
    """Return the time of a request that is answered."""
    began = time.monotonic()
    status, told = await world.ask(gateway, key)
    assert status == 200, told
    return time.monotonic() - began


async def unlimited_key(world: Surroundings, gateway: GatewayProcess) -> str:
    """Return a key whose requests ask nothing of Redis."""
    key = new_key()
    world.api.put(key_secret("unlimited", key, **{client_keys.NAMESPACES: NAMESPACE}))

    async def known() -> bool:
        return (await world.ask(gateway, key))[0] == 200

    await gateway.until(known, "the key without limits is not known")
    return key


async def until_local(world: Surroundings, gateway: GatewayProcess) -> None:
    """Send requests until limits are local. One may be excused: its process could not run in time."""

    async def local() -> bool:
        assert (await world.ask(gateway))[0] == 200
        return await gateway.metric("fleetkeeper_gateway_limits_shared") == 0

    await gateway.until(local, "limits never became local")


async def until_counted(world: Surroundings, gateway: GatewayProcess) -> None:
    """Wait until a request is counted in Redis: limits are shared again."""
    name = "fleetkeeper:limits:{client/standard}:requests"
    with world.redis.client() as client:
        client.delete(name)

        async def counted() -> bool:
            await world.ask(gateway)
            return bool(client.exists(name))

        await gateway.until(counted, "no request is counted in Redis")


@pytest.mark.promise("redis-gone")
@pytest.mark.parametrize(
    "delay_s",
    [
        pytest.param(0.03, id="30ms-within-the-budget", marks=pytest.mark.exhaustive),
        pytest.param(0.2, id="200ms-beyond-it"),
    ],
)
async def test_requests_wait_little_for_a_slow_redis_and_share_again(
    world: Surroundings, delay_s: float
) -> None:
    """Within the budget each waits once, before it is sent. Beyond it, the first one waits alone."""
    async with SlowProxy(world.redis.port) as proxy:
        gateway = await world.start(REDIS_URL=f"redis://127.0.0.1:{proxy.port}/0")
        free = await unlimited_key(world, gateway)
        added: list[float] = []
        then: list[float] = []
        for done in range(TRIES.stop):
            if done >= TRIES.start and max(min(added), min(then, default=0)) <= WITHIN_S:
                break
            await world.until_shared(gateway)
            proxy.delay_s = delay_s
            usual_s = await seconds_of(world, gateway, free)
            added.append(await seconds_of(world, gateway, world.key) - usual_s)
            if delay_s > Timing().budget_s:
                await until_local(world, gateway)
                usual_s = await seconds_of(world, gateway, free)
                then.append(await seconds_of(world, gateway, world.key) - usual_s)
            proxy.delay_s = 0.0
        print(f"{delay_s * 1000:.0f} ms: the first request took {min(added) * 1000:.1f} ms more")
        assert min(added) <= WITHIN_S, added
        if then:
            print(f"and the next one {min(then) * 1000:.1f} ms")
            assert min(then) <= WITHIN_S, then
            told = events(gateway)
            assert told.count(LOCAL) >= len(then)
            assert all(one != other for one, other in itertools.pairwise(told)), "each change once"
            assert await gateway.metric("fleetkeeper_gateway_limits_redis_failures_total") >= len(
                then
            )
        await world.until_shared(gateway)
        await until_counted(world, gateway)
        assert events(gateway)[-1] == SHARED
        assert gateway.tracebacks() == []
        await world.at_rest(gateway)


@pytest.mark.exhaustive
async def test_limits_hold_while_redis_is_slow(world: Surroundings) -> None:
    """Those of this replica: running requests count, also the ones that Redis knows already."""
    key = world.add_key("two", concurrency="2")
    async with SlowProxy(world.redis.port) as proxy:
        gateway = await world.start(REDIS_URL=f"redis://127.0.0.1:{proxy.port}/0")
        await world.until_shared(gateway)
        async with world.open(gateway, key, answer_as="hold", stream=True):
            await world.upstream.open(1)
            proxy.delay_s = 0.2
            async with world.open(gateway, key, answer_as="hold", stream=True):
                await world.upstream.open(2)
                await until_local(world, gateway)
                status, refusal = await world.ask(gateway, key)
                assert (status, json.loads(refusal)["error"]["limit"]) == (429, "concurrency")
                world.upstream.release()
        proxy.delay_s = 0.0
        await world.until_shared(gateway)
        await world.at_rest(gateway)
        assert (await world.ask(gateway, key))[0] == 200


def counted_names(server: RedisServer, password: str) -> list[str]:
    """Return what the server holds of the key's limits."""
    client = redis.Redis(
        port=server.port, password=password, socket_timeout=GUARD_S, decode_responses=True
    )
    with client:
        return [str(name) for name in client.scan_iter("fleetkeeper:limits:{client/*")]


@pytest.mark.exhaustive
async def test_redis_is_reached_by_tls_with_a_password_that_changes(
    world: Surroundings, tmp_path: Path
) -> None:
    tls = RedisTls(tmp_path / "tls")
    password = tmp_path / "password"
    password.write_text("canary-first\n")
    with redis_server(
        tmp_path / "secured", *tls.options, "--requirepass", "canary-first"
    ) as server:
        gateway = await world.start(
            REDIS_URL=tls.url,
            REDIS_CA_FILE=str(tls.ca_file),
            REDIS_PASSWORD_FILE=str(password),
        )
        await world.until_shared(gateway)

        async def counted() -> bool:
            assert (await world.ask(gateway))[0] == 200
            return bool(await asyncio.to_thread(counted_names, server, "canary-first"))

        await gateway.until(counted, "no request is counted in Redis")
        # The Secret changes: the file first, then the server, which ends its connections.
        password.write_text("canary-second\n")
        admin = redis.Redis(port=server.port, password="canary-first", socket_timeout=GUARD_S)
        with admin:
            admin.config_set("requirepass", "canary-second")
            admin.client_kill_filter(_type="normal", skipme=True)
        await gateway.until(lambda: events(gateway).count(SHARED) > 1, "it never connects again")
        assert (await world.ask(gateway))[0] == 200
    for secret in ("canary-first", "canary-second"):
        assert secret not in gateway.log.read_text()
    assert gateway.tracebacks() == []


async def test_a_redis_with_a_certificate_of_another_authority_is_not_trusted(
    world: Surroundings, tmp_path: Path
) -> None:
    tls, other = RedisTls(tmp_path / "tls"), RedisTls(tmp_path / "other")
    with redis_server(tmp_path / "secured", *tls.options):
        gateway = await world.start(REDIS_URL=tls.url, REDIS_CA_FILE=str(other.ca_file))
        await gateway.until(
            lambda: LOCAL in events(gateway), "it does not say that limits are local"
        )
        assert (await world.ask(gateway))[0] == 200
        assert await gateway.metric("fleetkeeper_gateway_limits_shared") == 0
        assert "certificate verify failed" in gateway.log.read_text()
