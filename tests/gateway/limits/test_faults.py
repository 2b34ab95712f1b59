"""A Redis that is slow, full, read-only, gone or emptied: requests go on under local limits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.interfaces import Key, Limiter, LimitRefused
from fleetkeeper_gateway.limits import LimitSettings
from tests.support.gateway.limits_world import (
    BRIEF,
    PATIENT,
    Replica,
    Replicas,
    admitted,
    demand_of,
    key_with,
    refused,
    until,
    until_admitted,
)
from tests.support.lanes import keep_first
from tests.support.services.redis_server import RedisServer, redis_server

SLOTS = "fleetkeeper:limits:{team-a/standard}:slots"


def admitted_without_waiting(limiter: Limiter, key: Key) -> bool:
    """Whether a request is decided before anything is awaited. Closes nothing, asks nobody."""
    call = limiter.admit(demand_of(key)).__await__()
    try:
        next(call)
    except StopIteration:
        return True
    except LimitRefused:
        return False
    raise AssertionError("a request waits for a server that has failed")


async def tries_in_vain(replica: Replica) -> None:
    """Wait until the server failed some more tests."""
    failures = replica.value("redis_failures_total")
    await until(lambda: replica.value("redis_failures_total") > failures + 3, "it tries again")
    assert not replica.shares


def block_event_loop(seconds: float) -> None:
    """Do what a long computation in the gateway would."""
    time.sleep(seconds)


async def local_limits_hold(replica: Replica, key_id: str) -> None:
    """Exactly the limit is admitted, by this replica alone and without a wait."""
    key = key_with(requests=3, tokens=100, key_id=key_id)
    found = [admitted_without_waiting(replica.limiter, key) for _ in range(6)]
    assert found == [True] * 3 + [False] * 3


async def test_a_frozen_server_is_waited_for_once_and_is_asked_again_when_it_thaws(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url, BRIEF)
    with capture_logs() as logs:
        redis.freeze()
        key = key_with(concurrency=2)
        # Nothing but the budget's timer can end this wait.
        await admitted(replica.limiter, key, 2)
        assert not replica.shares
        await refused(replica.limiter, demand_of(key))
        await local_limits_hold(replica, "frozen")
        await tries_in_vain(replica)
        redis.thaw()
        await replica.until_shared()
    assert [entry["log_level"] for entry in logs] == ["warning", "info"], logs
    # The other replicas know of the running requests.
    with redis.client() as client:
        await until(lambda: client.zcard(SLOTS) >= 2, "slots of running requests")
    another = await replicas.shared(redis.url)
    assert (await refused(another.limiter, demand_of(key))).limit == "concurrency"


@pytest.mark.promise("redis-gone")
async def test_local_limits_begin_with_what_this_replica_admitted(
    redis: RedisServer, replicas: Replicas
) -> None:
    """Else a client that breaks the link has its limit twice within a minute."""
    replica = await replicas.shared(redis.url)
    requests, tokens = key_with(requests=3, key_id="a"), key_with(tokens=100, key_id="b")
    await admitted(replica.limiter, requests, 3)
    await admitted(replica.limiter, tokens, 2, tokens=45)
    redis.kill()
    await replica.until_local()
    assert (await refused(replica.limiter, demand_of(requests))).limit == "requests"
    assert (await refused(replica.limiter, demand_of(tokens, 50))).limit == "tokens"
    await local_limits_hold(replica, "another")


async def test_a_refusal_by_the_limit_of_requests_holds_for_the_next_body_too(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    key = key_with(requests=1)
    replica.limiter.check(key, Tier.STANDARD)
    await admitted(replica.limiter, key, 1)
    replica.limiter.check(key, Tier.STANDARD)
    refusal = await refused(replica.limiter, demand_of(key))
    with pytest.raises(LimitRefused) as again:
        replica.limiter.check(key, Tier.STANDARD)
    assert again.value.limit == "requests"
    assert refusal.retry_after_s - 1 <= again.value.retry_after_s <= refusal.retry_after_s
    replica.limiter.check(key, Tier.BATCH)
    replica.limiter.check(key_with(requests=2), Tier.STANDARD)


async def test_a_refusal_by_another_limit_says_nothing_about_the_next_body(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    key = key_with(tokens=10, requests=9)
    await admitted(replica.limiter, key, 1, tokens=5)
    assert (await refused(replica.limiter, demand_of(key, 10))).limit == "tokens"
    replica.limiter.check(key, Tier.STANDARD)


@pytest.mark.exhaustive
async def test_no_request_waits_behind_a_call_that_may_take_longer(
    redis: RedisServer, replicas: Replicas
) -> None:
    """Leases are renewed, and tokens settled, within a longer time than requests have."""
    replica = await replicas.shared(redis.url, BRIEF)
    redis.freeze()
    settling = asyncio.create_task(replica.limiter.settle("other", Tier.STANDARD, "request", 1))
    await asyncio.sleep(0)
    # Nothing but the request's own budget can end this wait: the other call has two minutes.
    async with asyncio.timeout(BRIEF.settle_budget_s / 2):
        await admitted(replica.limiter, key_with(concurrency=2), 1)
    assert not replica.shares
    await settling
    assert replica.value("unsettled_total") == 1


@pytest.mark.exhaustive
async def test_a_busy_event_loop_is_not_taken_for_a_slow_server(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url, replace(PATIENT, budget_s=1.0))
    for _ in range(3):
        call = asyncio.create_task(replica.limiter.admit(demand_of(key_with(requests=10))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        block_event_loop(1.2)
        await call
        assert replica.shares
    with redis.client() as client:
        assert client.get("fleetkeeper:limits:{team-a/standard}:requests") == "3"


@pytest.mark.exhaustive
async def test_what_a_frozen_server_takes_late_is_given_back(
    redis: RedisServer, replicas: Replicas
) -> None:
    """Requests that ended, or were refused, while it did not answer hold nothing afterwards."""
    replica = await replicas.shared(redis.url, BRIEF)
    key = key_with(concurrency=1, tokens=100)
    redis.freeze()
    calls = [replica.limiter.admit(demand_of(key, tokens=100)) for _ in range(5)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    (only,) = [each for each in found if not isinstance(each, BaseException)]
    await only.release(sent=False)
    redis.thaw()
    await replica.until_shared()
    with redis.client() as client:
        await until(lambda: client.zcard(SLOTS) == 0, "no slot is taken")
    other = await replicas.shared(redis.url)
    await other.limiter.admit(demand_of(key, tokens=100))


@pytest.mark.exhaustive
async def test_what_a_frozen_server_takes_for_a_request_refused_here_is_given_back(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url, BRIEF)
    key = key_with(tokens=100)
    redis.kill()
    await replica.until_local()
    await replica.limiter.admit(demand_of(key, tokens=100))
    redis.start()
    await replica.until_shared()
    redis.freeze()
    await refused(replica.limiter, demand_of(key, tokens=100))
    redis.thaw()
    await replica.until_shared()
    another = await replicas.shared(redis.url)
    await until_admitted(another.limiter, key, tokens=100)
    with redis.client() as client:
        assert client.hlen("fleetkeeper:limits:{team-a/standard}:held") == 1


@pytest.mark.promise("redis-gone")
async def test_a_full_server_makes_limits_local_until_it_has_room(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    with redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        await replica.limiter.admit(demand_of(key_with(requests=5)))
        await local_limits_hold(replica, "full")
        await tries_in_vain(replica)
        client.config_set("maxmemory", "0")
    await replica.until_shared()


@pytest.mark.parametrize(
    "limit", keep_first(1, ["requests", "tokens", "concurrency"], pytest.mark.exhaustive)
)
async def test_every_kind_of_limit_notices_a_full_server(
    redis: RedisServer, replicas: Replicas, limit: str
) -> None:
    replica = await replicas.shared(redis.url)
    with redis.client() as client:
        client.config_set("maxmemory", "1mb")
        await replica.limiter.admit(demand_of(key_with(**{limit: 5})))  # type: ignore[arg-type]
        assert not replica.shares


@pytest.mark.promise("redis-gone")
async def test_a_read_only_copy_makes_limits_local_until_it_is_written_to(
    redis: RedisServer, replicas: Replicas, tmp_path: Path
) -> None:
    replica = await replicas.shared(redis.url)
    with redis_server(tmp_path / "primary") as primary, redis.client() as client:
        client.replicaof("127.0.0.1", str(primary.port))
        await replica.limiter.admit(demand_of(key_with(requests=5)))
        assert not replica.shares
        await local_limits_hold(replica, "read-only")
        await tries_in_vain(replica)
        client.replicaof("NO", "ONE")
        await replica.until_shared()


@pytest.mark.promise("redis-gone")
async def test_a_killed_server_that_begins_empty_learns_scripts_and_running_requests(
    redis: RedisServer, replicas: Replicas
) -> None:
    # Leases are renewed when the server is back, not only when it is time.
    timing = replace(PATIENT, renew_s=3600.0)
    one, two = [await replicas.shared(redis.url, timing) for _ in range(2)]
    key = key_with(concurrency=3)
    first, _ = [*await admitted(one.limiter, key, 1), *await admitted(two.limiter, key, 1)]
    redis.kill()
    await one.until_local()
    await local_limits_hold(one, "killed")
    meanwhile = (await admitted(one.limiter, key, 1))[0]
    redis.start()
    for replica in (one, two):
        await replica.until_shared()
    with redis.client() as client:
        await until(lambda: client.zcard(SLOTS) == 3, "slots of running requests")
        assert (await refused(two.limiter, demand_of(key))).limit == "concurrency"
        for admission in (first, meanwhile):
            await admission.release(sent=True)
        # Nobody waits for that: the new server has to learn the script first.
        await until(lambda: client.zcard(SLOTS) == 1, "the slots are given back")
    await admitted(two.limiter, key, 2)


@pytest.mark.exhaustive
async def test_a_server_that_is_rolled_back_keeps_running_requests_and_frees_ended_ones(
    redis: RedisServer, replicas: Replicas
) -> None:
    """As by a failover to a copy that is behind, or a restart from an old dump."""
    timing = replace(PATIENT, lease_s=3.0, renew_s=0.2)
    limiter = (await replicas.shared(redis.url, timing)).limiter
    key = key_with(concurrency=2, tokens=100)
    ended = await limiter.admit(demand_of(key, tokens=40))
    with redis.client() as client:
        names = client.keys("fleetkeeper:limits:{team-a*")
        for name in names:
            assert client.copy(name, f"old:{name}")
        await ended.release(sent=True)
        running = await limiter.admit(demand_of(key))
        for name in names:
            client.rename(f"old:{name}", name)
        # The request that runs is counted again, and the slot of the other one ends with its lease.
        await until(lambda: client.zcard(SLOTS) >= 2, "the leases are renewed")
        await until_admitted(limiter, key)
        assert (await refused(limiter, demand_of(key))).limit == "concurrency"
        await running.release(sent=True)
        await limiter.admit(demand_of(key))


@pytest.mark.exhaustive
async def test_a_server_that_forgot_the_scripts_is_told_them_in_the_same_request(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    key = key_with(requests=100, tokens=100, concurrency=3)
    with redis.client() as client:
        for _ in range(3):
            client.script_flush()
            admission = await replica.limiter.admit(demand_of(key))
            client.script_flush()
            await admission.release(sent=True)
            client.script_flush()
            await replica.limiter.settle(key.id, Tier.STANDARD, "unknown", 1)
        assert client.zcard(SLOTS) == 0
    assert replica.value("redis_failures_total") == 0


@pytest.mark.exhaustive
async def test_an_idle_connection_that_the_server_closes_is_replaced(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    with redis.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
        await replica.until_local()
        await replica.until_shared()
    await replica.limiter.admit(demand_of(key_with(requests=1)))
    await refused(replica.limiter, demand_of(key_with(requests=1)))


async def test_without_a_server_from_the_start_limits_are_local_until_it_starts(
    replicas: Replicas, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        replica = replicas.start(LimitSettings(redis_url=server.url), PATIENT)
        await admitted(replica.limiter, key_with(requests=2), 2)
        await refused(replica.limiter, demand_of(key_with(requests=2)))
        await local_limits_hold(replica, "never")
        server.start()
        await replica.until_shared()


async def test_settling_without_a_server_raises_nothing_and_is_counted(
    redis: RedisServer, replicas: Replicas
) -> None:
    replica = await replicas.shared(redis.url)
    redis.kill()
    await replica.limiter.settle("team-a", Tier.STANDARD, "request", 10)
    await replica.limiter.settle("team-a", Tier.STANDARD, "request", 10)
    assert replica.value("unsettled_total") == 2


@pytest.mark.exhaustive
async def test_limits_stay_exact_while_requests_come_during_faults(
    redis: RedisServer, replicas: Replicas
) -> None:
    """Whatever happens to the server: no error reaches a request, and all slots come back."""
    replica = await replicas.shared(redis.url, BRIEF)
    key = key_with(requests=100_000, tokens=10_000_000, concurrency=4)
    stop = asyncio.Event()
    running, most, count = 0, 0, 0

    async def client() -> None:
        nonlocal running, most, count
        while not stop.is_set():
            admission = await until_admitted(replica.limiter, key)
            running += 1
            most, count = max(most, running), count + 1
            await asyncio.sleep(0)
            running -= 1
            await admission.release(sent=count % 2 == 0)

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for fault in (redis.freeze, redis.thaw, redis.kill, redis.start):
        fault()
        reached = count
        await until(lambda reached=reached: count > reached + 100, "requests go on")  # type: ignore[misc]
    await replica.until_shared()
    stop.set()
    await asyncio.gather(*clients)
    assert most <= 4
    with redis.client() as connection:
        await until(lambda: connection.zcard(SLOTS) == 0, "all slots are free")
