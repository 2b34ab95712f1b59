"""Which lines are given out: by model and free slots, by deadline, and fairly by key."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from fleetkeeper_gateway.batch.interfaces import QueueDown, Taken
from tests.gateway.batch.queue.world import GUARD_S, PATIENT, World, lines_of, numbers, until
from tests.support.lanes import keep_first

HOUR = 3600
DAY = 86_400


async def test_lines_come_in_order_and_no_more_than_there_are_slots(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 1203)
    routes = {"key-a/tiny": "route"}
    first = await queue.take({"route": 600}, GUARD_S, routes)
    second = await queue.take({"route": 1000}, GUARD_S, routes)
    assert numbers(first) == list(range(600))
    assert numbers(second) == list(range(600, 1203))
    assert [each.line for each in (*first, *second)] == lines_of(1203)
    assert {each.batch for each in first} == {record}
    assert {(each.attempt, each.model) for each in first} == {(1, "tiny")}
    fences = [each.fence for each in (*first, *second)]
    assert fences == sorted(set(fences))
    assert await queue.take({"*": 10}, 0) == []


async def test_each_route_has_its_own_slots(world: World) -> None:
    queue = await world.queue()
    for model in ("one", "two", "three:b"):
        await world.submit(queue, 50, model=model)
    routes = {f"key-a/{model}": model for model in ("one", "two", "four")}
    rooms = {"one": 0, "two": 0, "four": 0}
    taken = await queue.take({**rooms, "one": 3, "*": 2}, 0, routes)
    assert Counter(each.model for each in taken) == {"one": 3, "three:b": 2}
    taken = await queue.take({**rooms, "two": 7}, 0, routes)
    assert Counter(each.model for each in taken) == {"two": 7}
    assert not await queue.take({**rooms, "four": 7}, 0, routes)


@pytest.mark.promise("batch-quotas")
@pytest.mark.parametrize("slots", keep_first(1, [1, 5, 64], pytest.mark.exhaustive))
async def test_many_small_batches_and_a_big_one_of_another_key_get_half_each(
    world: World, slots: int
) -> None:
    queue = await world.queue()
    small, lines = (1000, 50_000) if slots == 64 else (60, 3000)
    await world.submit(queue, lines, "key-b")
    for _ in range(small):
        await world.submit(queue, 10, "key-a")
    got: Counter[str] = Counter()
    while got.total() < small * 10:
        taken = await queue.take({"*": slots}, 0)
        got.update(each.batch.key_id for each in taken)
        await world.finish(queue, taken)
        difference = abs(got["key-a"] - got["key-b"])
        assert difference <= 16, got


async def test_a_key_that_submits_line_by_line_does_not_pass_another(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 500, "waits")
    got: Counter[str] = Counter()
    for _ in range(100):
        await world.submit(queue, 1, "again")
        got.update(each.batch.key_id for each in await queue.take({"*": 1}, 0))
    assert got["waits"] >= 49, got


async def test_an_idle_key_earns_no_credit(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 2000, "busy")
    for _ in range(20):
        await queue.take({"*": 50}, 0)
    await world.submit(queue, 2000, "new")
    taken = await queue.take({"*": 160}, 0)
    shares = Counter(each.batch.key_id for each in taken)
    assert abs(shares["busy"] - shares["new"]) <= 16, shares


async def test_the_earliest_deadline_gets_three_quarters_and_nobody_starves(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 4000, "soon", expires=DAY)
    await world.submit(queue, 4000, "later", expires=DAY + 10 * HOUR)
    shares: Counter[str] = Counter()
    for _ in range(100):
        shares.update(each.batch.key_id for each in await queue.take({"*": 10}, 0))
    # One of four lines goes to any class, there to the key with the fewest.
    assert shares.total() == 1000
    assert 230 <= shares["later"] <= 270, shares


async def test_batches_of_a_key_come_by_deadline(world: World) -> None:
    queue = await world.queue()
    ends = [DAY + 3000, DAY + 10 * HOUR, DAY + 5, DAY + HOUR]
    for end in ends:
        await world.submit(queue, 3, expires=end)
    taken = await world.drain(queue, slots=1)
    assert [each.batch.expires for each in taken] == sorted(ends * 3)


async def test_a_take_waits_until_lines_come(world: World) -> None:
    queue = await world.queue()
    other = await world.queue("two")
    waiting = [asyncio.create_task(each.take({"*": 5}, GUARD_S)) for each in (queue, other)]
    await asyncio.sleep(0)
    await world.submit(queue, 1)
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=GUARD_S)
    assert [numbers(await each) for each in done] == [[0]]
    await world.submit(other, 1)
    assert [numbers(each) for each in await asyncio.gather(*waiting)] == [[0], [0]]


async def test_news_come_without_a_check(world: World) -> None:
    """An event ends the wait, not the check of the link."""
    queue = await world.queue(timing=replace(PATIENT, check_s=3600))
    waiting = asyncio.create_task(queue.take({"*": 5}, 3600))
    await asyncio.sleep(0)
    record = await world.submit(queue, 1)
    async with asyncio.timeout(GUARD_S):
        (taken,) = await waiting
        again = asyncio.create_task(queue.take({"*": 5}, 3600))
        await asyncio.sleep(0)
        await queue.give_back([taken], attempt_counts=False)
        (same,) = await again
    assert (same.batch, same.line, same.attempt) == (record, taken.line, 1)


async def test_a_take_ends_after_its_time(world: World) -> None:
    queue = await world.queue()
    assert not await queue.take({"*": 5}, 0.01)
    world.redis.kill()
    await until(lambda: not queue.up, "the queue is down")
    with pytest.raises(QueueDown):
        await queue.take({"*": 5}, 0.01)
    world.redis.start()
    await queue.until_up(GUARD_S)


async def test_what_a_cancelled_take_would_have_got_goes_back(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 40)
    for _ in range(20):
        task = asyncio.create_task(queue.take({"*": 2}, GUARD_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        found = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
    taken: list[Taken] = []
    async with asyncio.timeout(GUARD_S):
        while len(taken) < 40:
            taken += await queue.take({"*": 40}, GUARD_S)
    assert sorted(numbers(taken)) == list(range(40))
    assert {each.attempt for each in taken} == {1}
