"""Processes end, and Redis is killed, emptied, set back, full or of the wrong kind."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import KEY, MODEL, World, chunks, metric, until, up
from tests.support.batch.batch_process import (
    append_only_files,
    copy_append_only,
    restore_append_only,
)
from tests.support.lanes import keep_first

# Chunks of processes that ended or stood still.


async def test_what_is_not_renewed_waits_again_and_is_lost(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 3)
    held = await one.take(KEY, 2)
    world.idle(held)
    assert await one.renew(held[:1], {}) == set()
    assert await world.counts(two, record) == (3, 1)
    assert await one.renew(held, {}) == {held[1]}
    assert chunks(await two.take(KEY, 5)) == [2, 1]
    # The process that comes late changes nothing for the one that holds it now.
    await one.done(held[1])
    await one.give_back(held[1:])
    assert await world.counts(two, record) == (3, 3)


async def test_a_new_connection_leaves_time_to_renew(world: World) -> None:
    """A server that stood still counts that time as idle."""
    one, new = await world.queue("one"), await world.queue("new", settle_s=3600)
    record = await world.submit(one, 600)
    held = [*await one.take(KEY, 500), *await one.take(KEY, 100)]
    world.idle(held)
    assert await world.counts(new, record) == (600, 600)
    assert await world.counts(one, record) == (600, 100), "as many as one call may move"
    assert await world.counts(one, record) == (600, 0)


async def test_a_parent_releases_what_a_process_held_that_ended(world: World) -> None:
    parent, child, other = [await world.queue(name) for name in ("parent", "child", "other")]
    for number in range(60):
        await world.submit(parent, 2, f"key-{number % 2}")
    record = await world.submit(parent, 150, "key-0")
    held = [*await child.take("key-0", 500), *await child.take("key-1", 500)]
    assert len(held) == 270
    await parent.add(record, MODEL, [150])
    (kept,) = await other.take("key-0", 500)
    await world.end(child)
    await parent.release("child")
    assert await other.renew([kept], {}) == set()
    assert len(await other.take("key-0", 500)) == 210
    assert len(await other.take("key-1", 500)) == 60


async def test_a_take_whose_answer_is_lost_leaves_its_chunks_to_others(world: World) -> None:
    hasty, two = await world.queue("hasty", call_s=0.5), await world.queue("two")
    record = await world.submit(two, 2)
    world.redis.freeze()
    with pytest.raises(QueueDown, match="no answer in time"):
        await hasty.take(KEY, 2)
    world.redis.thaw()
    await until_held(world, two, record)
    assert await two.take(KEY, 2) == []
    await two.release("hasty")
    assert chunks(await two.take(KEY, 2)) == [0, 1]


async def until_held(world: World, queue: RedisQueue, record: BatchRecord) -> None:
    """Wait until both chunks of a batch are held."""
    while await world.counts(queue, record) != (2, 2):  # noqa: ASYNC110 - Redis tells nobody
        await asyncio.sleep(0.01)


# What Redis forgets.


@pytest.mark.parametrize("reset", ["killed", "flushed"])
async def test_a_server_that_lost_everything_is_filled_again(world: World, reset: str) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    assert (one.server, two.server) == (1, 1)
    record = await world.submit(one, 600)
    held = await one.take(KEY, 5)
    if reset == "killed":
        world.redis.kill()
        shutil.rmtree(append_only_files(world.redis))
        world.redis.start()
        await until(lambda: one.server == two.server == 2, "both processes see it")
        await up(one)
        await up(two)
    else:
        with world.redis.client() as client:
            client.flushall()
    assert await two.state(record) is None
    assert await one.renew(held, {}) == set(held)
    await two.add(record, MODEL, range(600))
    assert len([*await two.take(KEY, 500), *await two.take(KEY, 500)]) == 600


async def test_an_older_file_gives_done_chunks_out_again_and_loses_none(
    world: World, tmp_path: Path
) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 6)
    for held in await queue.take(KEY, 2):
        await queue.done(held)
    copy_append_only(world.redis, tmp_path / "earlier")
    later = await queue.take(KEY, 2)
    await queue.done(later[0])
    await queue.add(record, MODEL, [6])
    world.redis.kill()
    restore_append_only(world.redis, tmp_path / "earlier")
    world.redis.start()
    await until(lambda: queue.server == 2, "the restart is seen")
    await up(queue)
    assert await queue.renew(later, {}) == set(later)
    await queue.add(record, MODEL, [3, 4, 5, 6])
    assert chunks(await queue.take(KEY, 10)) == [2, 3, 4, 5, 6]


async def test_calls_say_that_redis_is_down_and_metrics_do(world: World) -> None:
    before = metric("failures_total")
    queue = world.begin()
    with pytest.raises(QueueDown, match="not connected yet"):
        await queue.keys()
    await up(queue)
    assert (metric("up"), metric("failures_total")) == (1, before)
    world.redis.kill()
    await until(lambda: not queue.up, "the end of the connection is seen")
    with pytest.raises(QueueDown):
        await queue.take(KEY, 1)
    await until(lambda: metric("failures_total") > before, "the failure counts")
    assert metric("up") == 0
    world.redis.start()
    await up(queue)
    assert await queue.keys() == {}


# Servers that are not fit.


@pytest.mark.parametrize(
    "policy", keep_first(1, ["volatile-lru", "allkeys-lru", "volatile-ttl"], pytest.mark.exhaustive)
)
async def test_a_server_that_drops_keys_when_it_is_full_is_not_used(
    world: World, policy: str
) -> None:
    with world.redis.client() as client:
        client.config_set("maxmemory", "64mb")
        client.config_set("maxmemory-policy", policy)
        before = metric("failures_total")
        queue = world.begin()
        await until(lambda: metric("failures_total") > before, "it was tried")
        with pytest.raises(QueueDown, match=f"is {policy}, .* set it to noeviction"):
            await queue.keys()
        client.config_set("maxmemory-policy", "noeviction")
        await up(queue)


async def test_a_copy_of_another_server_is_not_used(world: World) -> None:
    queue = await world.queue()
    with world.redis.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await until(lambda: not queue.up, "it is a copy now")
        await until(lambda: "must lead to the primary" in queue._reason, "it says why")
        client.execute_command("REPLICAOF", "NO", "ONE")
    await up(queue)


async def test_a_server_with_little_room_takes_no_more_chunks(world: World) -> None:
    with world.redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "16mb")
        queue = await world.queue()
        record = await world.submit(queue, 3)
        held = await queue.take(KEY, 1)
        for _ in range(10):
            client.append("filler", "x" * 1_000_000)
        await until(lambda: queue._no_room != "", "the check finds it")
        for add in (queue.add(record, MODEL, [3]), world.submit(queue, 1)):
            with pytest.raises(QueueDown, match=r"of its maxmemory.*raise maxmemory"):
                await add
        # Even a full one does everything else.
        client.config_set("maxmemory", "1mb")
        assert await world.counts(queue, record) == (3, 1)
        assert await queue.leads("task")
        assert await queue.keys() == {KEY: 0}
        assert await queue.renew(held, {KEY: 5}) == set()
        assert await queue.keys() == {KEY: 5}
        await queue.give_back(held)
        held = await queue.take(KEY, 3)
        world.idle(held[:1])
        assert await world.counts(queue, record) == (3, 2)
        held = [*held[1:], *await queue.take(KEY, 3)]
        assert chunks(held) == [2, 0, 1]
        for each in held:
            await queue.done(each)
        assert await queue.emptied() == [record.id]
        await queue.remove(record)
        client.delete("filler")
        client.config_set("maxmemory", "16mb")
        await until(lambda: queue._no_room == "", "the check finds room")
        await world.submit(queue, 1)
