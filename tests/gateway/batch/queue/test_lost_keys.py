"""A key of the queue that Redis dropped by itself stops no lines, whichever key it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Result
from fleetkeeper_gateway.batch.queue import RedisQueue
from fleetkeeper_gateway.batch.queue.epochs import FOLDER
from fleetkeeper_gateway.batch.queue.names import PREFIX, fence_base
from tests.gateway.batch.queue.world import GUARD_S, LEASE_S, World, numbers, until
from tests.support.lanes import keep_first
from tests.support.redis_server import redis_server

LINES = 12


async def busy(world: World, queue: RedisQueue) -> list[BatchRecord]:
    """Batches of two keys and two models, of which lines wait, run and are done."""
    records = [
        await world.submit(queue, LINES, "key-a"),
        await world.submit(queue, LINES, "key-b", expires=7200),
        await world.submit(queue, LINES, "key-b", model="other"),
    ]
    await world.finish(queue, await queue.take({"*": 10}, GUARD_S))
    await queue.take({"*": 10}, GUARD_S)
    assert await queue.leads("a task")
    return records


def keys_of(world: World) -> list[str]:
    """Return the keys of the queue."""
    with world.redis.client() as client:
        found = client.keys(f"{PREFIX}*")
    assert isinstance(found, list)
    return sorted(map(str, found))


def kind_of(name: str, records: list[BatchRecord]) -> str:
    """Return a name that is the same each time."""
    for number, record in enumerate(records):
        name = name.replace(record.id, f"batch-{number}")
    return re.sub(r"class-?\d+", "class", name)


async def done(world: World, queue: RedisQueue, records: list[BatchRecord]) -> None:
    """Work as the worker and the lifecycle do, until every line of every batch is done."""
    while True:
        try:
            await queue.check()
            await world.finish(queue, await queue.take({"*": 64}, 0))
            counts = [await queue.counts(record) for record in records]
            for record, found in zip(records, counts, strict=True):
                if found is None:
                    await queue.add(record, *world.batches.found[record.id])
            if counts == [Counts(LINES, LINES, 0)] * len(records):
                return
        except QueueDown:
            await queue.until_up(GUARD_S)


async def test_any_one_key_may_be_gone(world: World) -> None:
    """Everything that waits, runs or is done is counted once, of all keys and models."""
    queue = await world.queue()
    records = await busy(world, queue)
    kinds = [kind_of(name, records) for name in keys_of(world)]
    assert {"lines", "done", "meta"} <= {kind.rpartition(":")[2] for kind in kinds}
    assert len(kinds) > 20
    for kind in kinds:
        (name,) = [each for each in keys_of(world) if kind_of(each, records) == kind] or [""]
        assert name, f"{kind} is not there in the next round"
        with world.redis.client() as client:
            client.delete(name)
        world.clock.advance(LEASE_S + 1)
        await done(world, queue, records)
        for record in records:
            await queue.remove(record)
            await world.batches.forget_active(record)
        records = await busy(world, queue)


async def test_a_key_that_is_gone_costs_one_rebuild(world: World) -> None:
    queue = await world.queue()
    records = await busy(world, queue)
    rebuilds = world.rebuilds()
    with world.redis.client() as client:
        client.delete(f"{PREFIX}{{{records[0].id}}}:lines")
    world.clock.advance(LEASE_S + 1)
    await done(world, queue, records)
    assert world.rebuilds() == rebuilds + 1


@pytest.mark.parametrize(
    "memory_and_policy",
    keep_first(1, ["64mb volatile-lru", "0 allkeys-lru"], pytest.mark.exhaustive),
)
async def test_a_server_that_keeps_what_does_not_expire_is_used(
    tmp_path: Path, memory_and_policy: str
) -> None:
    with redis_server(tmp_path / "redis", *_options(memory_and_policy)) as server:
        world = World(server)
        await world.queue()
        await world.close()


async def test_a_server_that_drops_lines_when_it_is_full_is_not_used(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *_options("64mb allkeys-lru")) as server:
        world = World(server)
        queue = world.begin()
        await until(lambda: world.value(queue, "failures_total"), "it was tried")
        with pytest.raises(QueueDown, match="set it to noeviction"):
            await queue.until_up(0)
        await world.close()


def _options(memory_and_policy: str) -> tuple[str, ...]:
    memory, policy = memory_and_policy.split()
    return "--maxmemory", memory, "--maxmemory-policy", policy


async def test_a_batch_that_cannot_be_read_keeps_no_other_out_of_the_queue(world: World) -> None:
    """Whatever its objects make the process fail with."""
    queue = await world.queue()
    bad, good = await world.submit(queue, 3, "key-a"), await world.submit(queue, 3, "key-b")
    world.batches.found[bad.id] = ("broken", [])  # type: ignore[assignment]
    rebuilds, defects = world.rebuilds(), metrics.DEFECTS.labels("rebuild")._value
    before = defects.get()
    with world.redis.client() as client:
        client.flushall()
    await world.until_reset(queue, rebuilds + 1)
    taken = await queue.take({"*": 10}, GUARD_S)
    assert {each.batch for each in taken} == {good}
    assert defects.get() == before + 1


async def test_a_record_that_cannot_be_read_keeps_no_lines_of_others(world: World) -> None:
    defects = metrics.DEFECTS.labels("record")._value
    before = defects.get()
    queue = await world.queue()
    bad, good = await world.submit(queue, 3, "key-a"), await world.submit(queue, 3, "key-b")
    with world.redis.client() as client:
        client.hset(f"{PREFIX}{{{bad.id}}}:meta", "record", '{"id": "of another version"}')
    taken = await queue.take({"*": 10}, GUARD_S)
    assert {each.batch for each in taken} == {good}
    assert defects.get() > before


@pytest.mark.parametrize("epoch", [2**20, 2**24 - 2])
async def test_the_queue_works_in_any_epoch(world: World, epoch: int) -> None:
    """Also in the last one that a fence of 64 bits has room for."""
    await world.objects.create(f"{FOLDER}{epoch:010d}", b"{}")
    await world.objects.create(f"{FOLDER}{epoch:010d}-ready", b"{}")
    queue = await world.queue()
    record = await world.submit(queue, 5)
    taken = await queue.take({"*": 2}, GUARD_S)
    assert [each.fence for each in taken] == [fence_base(epoch + 1) + 1, fence_base(epoch + 1) + 2]
    assert await queue.renew(taken) == set()
    await queue.give_back(taken[:1], attempt_counts=True)
    await world.finish(queue, taken[1:])
    assert sorted(numbers(await world.drain(queue))) == [0, 2, 3, 4]
    assert await queue.counts(record) == Counts(5, 5, 0)


async def test_fences_of_an_epoch_begin_where_the_last_result_ended(world: World) -> None:
    """Near the end of the numbers of one epoch: leases still fit into what Redis counts."""
    queue = await world.queue()
    record = await world.submit(queue, 4)
    last = fence_base(3) - 3
    await world.batches.add_segment(record, [Result(0, 1, last, True, b"{}")])
    rebuilds = world.rebuilds()
    with world.redis.client() as client:
        client.flushall()
    await world.until_reset(queue, rebuilds + 1)
    taken = await queue.take({"*": 3}, GUARD_S)
    assert [each.fence for each in taken] == [last + 1, last + 2, last + 3]
    assert await queue.renew(taken) == set()
    assert len(await world.finish(queue, taken)) == 3
