"""Chunks wait, are held, and are done."""

from __future__ import annotations

import asyncio

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import flow_of
from tests.gateway.batch.queue.world import (
    KEY,
    MODEL,
    PREFIX,
    World,
    batch_of,
    chunks,
)


async def test_chunks_are_held_once_and_done_once(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 5)
    assert await world.counts(one, record) == (5, 0)
    first, second = await one.take(KEY, 3), await two.take(KEY, 3)
    assert chunks(first) == [0, 1, 2]
    assert chunks(second) == [3, 4]
    assert {(each.batch, each.model, each.flow) for each in first} == {
        (record, MODEL, flow_of(KEY, MODEL))
    }
    assert await one.take(KEY, 3) == []
    assert await world.counts(two, record) == (5, 5)
    for each in first:
        await one.done(each)
    await one.done(first[0])
    assert await one.emptied() == []
    for each in second:
        await two.done(each)
    assert await world.counts(two, record) == (0, 0)
    assert await one.emptied() == [record.id]
    assert await one.emptied() == []


async def test_adding_is_idempotent(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 1200)
    held = [*await queue.take(KEY, 400), *await queue.take(KEY, 300)]
    await queue.done(held[0])
    await queue.add(record, MODEL, range(1, 1200))
    assert await world.counts(queue, record) == (1199, 699)
    await queue.add(record, MODEL, [0])
    assert chunks(await queue.take(KEY, 1200)) == [*range(700, 1200)]
    assert chunks(await queue.take(KEY, 1200)) == [0]


async def test_what_is_given_back_waits_behind_the_others(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 3)
    held = await one.take(KEY, 3)
    assert await two.keys() == {}
    await two.give_back(held)
    assert await world.counts(one, record) == (3, 3)
    await one.give_back([held[1], held[0], held[1]])
    assert await two.keys() == {KEY: 0}
    assert chunks(await two.take(KEY, 5)) == [1, 0]
    assert await one.renew(held, {}) == {held[0], held[1]}


async def test_the_earliest_deadline_of_a_key_is_first(world: World) -> None:
    queue = await world.queue()
    late = await world.submit(queue, 2, expires=10_000_000_000)
    other = await world.submit(queue, 2, "key-b", expires=1)
    early = await world.submit(queue, 2, expires=999)
    taken = await queue.take(KEY, 3)
    assert [each.batch for each in taken] == [early, early, late]
    assert [each.batch for each in await queue.take("key-b", 5)] == [other, other]
    assert [each.batch for each in await queue.take(KEY, 5)] == [late]


async def test_only_batches_of_an_earlier_deadline_are_taken(world: World) -> None:
    queue = await world.queue()
    early = await world.submit(queue, 2, expires=999)
    await world.submit(queue, 2, expires=1000)
    assert await queue.take(KEY, 1, before=999) == []
    taken = [*await queue.take(KEY, 1, before=999.5), *await queue.take(KEY, 5, before=1000)]
    assert [each.batch for each in taken] == [early, early]
    assert await queue.take(KEY, 5, before=1000) == []
    assert len(await queue.take(KEY, 5)) == 2


async def test_keys_whose_names_begin_alike_are_apart(world: World) -> None:
    queue = await world.queue()
    names = ["a", "a-", "a.b", "a0", "aa", "-", "0", "ä"]
    more = [f"key-{number}" for number in range(1100)]
    await asyncio.gather(*(world.submit(queue, 1, name) for name in names + more))
    assert await queue.keys() == dict.fromkeys(names + more, 0)
    for name in names:
        (held,) = await queue.take(name, 9)
        assert held.batch.key_id == name
    assert await queue.keys() == dict.fromkeys(more, 0)


async def test_flows_are_passed_over_and_not_forgotten(world: World) -> None:
    """However many batches of them there are, with whatever deadlines."""
    queue = await world.queue()
    for number in range(450):
        await world.submit(queue, 1, model=f"m/{number % 3}", expires=number)
    late = await world.submit(queue, 1, model="late")
    skip = {flow_of(KEY, f"m/{number}") for number in range(3)} | {flow_of("key-b", "late")}
    assert [each.batch for each in await queue.take(KEY, 5, skip)] == [late]
    assert await queue.keys() == {KEY: 0}
    assert await queue.take(KEY, 5, skip) == []
    rest = await queue.take(KEY, 500, [flow_of(KEY, "m/1")])
    assert {each.model for each in rest} == {"m/0", "m/2"}
    assert len(rest) == 300
    assert len(await queue.take(KEY, 500)) == 150
    assert await queue.keys() == {}


async def test_a_batch_that_is_removed_is_unknown(world: World) -> None:
    queue = await world.queue()
    before = world.names()
    record, emptied = await world.submit(queue, 3), await world.submit(queue, 1, "key-b")
    held = await queue.take(KEY, 2)
    for each in await queue.take("key-b", 1):
        await queue.done(each)
    for gone in (record, emptied, batch_of()):
        await queue.remove(gone)
    assert await queue.state(record) is None
    assert await queue.keys() == {}
    assert await queue.take(KEY, 5) == []
    assert await queue.renew(held, {}) == set(held)
    await queue.give_back(held)
    await queue.done(held[0])
    assert await queue.emptied() == []
    assert world.names() == before


async def test_running_lines_are_those_of_all_processes_for_30_seconds(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    for name in ("a", "b", "c"):
        await world.submit(one, 1, name)
    await one.renew([], {"a": 3, "b": 1, "other": 7, "c": 0})
    await two.renew([], {"a": 4})
    assert await one.keys() == {"a": 7, "b": 1, "c": 0}
    await one.renew([], {"b": 2})
    with world.redis.client() as client:
        now = int(client.time()[0])
        client.hset(f"{PREFIX}running", "dead", f"{now - 3700}/a/100")
        client.hset(f"{PREFIX}running", "ahead", f"{now + 3700}/a/100")
        client.hset(f"{PREFIX}running", "recent", f"{now - 5}/c/9")
        assert await two.keys() == {"a": 4, "b": 2, "c": 9}
        assert set(client.hkeys(f"{PREFIX}running")) == {"one", "two", "recent"}
    await two.renew([], {})
    assert await two.keys() == {"a": 0, "b": 2, "c": 9}


async def test_one_process_leads_until_it_resigns(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    assert await one.leads("task")
    assert await one.leads("task")
    assert not await two.leads("task")
    assert await two.leads("another")
    await two.resign("task")
    assert not await two.leads("task")
    await one.resign("task")
    assert await two.leads("task")
    with world.redis.client() as client:
        assert 0 < client.pttl(f"{PREFIX}lead:task") <= 30_000


async def test_a_record_that_cannot_be_read_keeps_no_chunks_of_others(world: World) -> None:
    defects = metrics.DEFECTS.labels("record")._value
    before = defects.get()
    queue = await world.queue()
    bad, good = await world.submit(queue, 3, expires=1), await world.submit(queue, 3)
    with world.redis.client() as client:
        client.hset(f"{PREFIX}{{{bad.id}}}:meta", "record", '{"id": "of another version"}')
    assert {each.batch for each in await queue.take(KEY, 10)} == {good}
    assert defects.get() == before + 1
