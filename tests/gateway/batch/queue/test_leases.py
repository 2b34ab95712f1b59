"""Leases: renewed while they are ours, given back, run out, and taken again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fleetkeeper_gateway.batch.interfaces import Commit
from fleetkeeper_gateway.batch.queue.records import batch_arguments, line_arguments
from fleetkeeper_gateway.batch.queue.scripts import ADD
from tests.gateway.batch.queue.world import GUARD_S, LEASE_S, PATIENT, World, batch_of, numbers


async def test_a_lease_that_ran_out_is_taken_again_with_a_higher_fence(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 3)
    first = await one.take({"*": 3}, GUARD_S)
    world.clock.advance(LEASE_S - 60)
    await two.check()
    assert not await two.take({"*": 3}, 0)
    world.clock.advance(61)
    await two.check()
    second = await two.take({"*": 3}, GUARD_S)
    assert numbers(second) == numbers(first) == [0, 1, 2]
    assert {each.attempt for each in second} == {2}
    assert min(each.fence for each in second) > max(each.fence for each in first)
    assert await one.renew(first) == set(first)
    assert await world.finish(one, first) == set()
    assert world.value(one, "refused_total", reason="lease") == 3
    assert await two.renew(second) == set()
    assert await world.finish(two, second) == {(record.id, n) for n in range(3)}
    assert await two.outstanding(record) == 0


async def test_renewed_leases_last(world: World) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 2000)
    taken = await one.take({"*": 2000}, GUARD_S)
    for _ in range(5):
        world.clock.advance(LEASE_S - 60)
        assert await one.renew(taken) == set()
        await two.check()
    assert not await two.take({"*": 1}, 0)
    assert len(await world.finish(one, taken)) == 2000
    assert await one.outstanding(record) == 0


async def test_a_lease_that_ran_out_counts_until_another_takes_the_line(world: World) -> None:
    # No check of any process happens in between.
    queue = await world.queue(timing=replace(PATIENT, check_s=3600))
    await world.submit(queue, 2)
    taken = await queue.take({"*": 2}, GUARD_S)
    world.clock.advance(2 * LEASE_S)
    assert await queue.renew(taken) == set()
    assert len(await world.finish(queue, taken[:1])) == 1
    world.clock.advance(2 * LEASE_S)
    await queue.check()
    assert await queue.renew(taken) == set(taken)


@pytest.mark.parametrize(("counts", "attempt"), [(True, 2), (False, 1)])
async def test_lines_are_given_back(world: World, counts: bool, attempt: int) -> None:
    queue = await world.queue()
    await world.submit(queue, 4)
    first = await queue.take({"*": 4}, GUARD_S)
    await queue.give_back(first[:2], attempt_counts=counts)
    second = await queue.take({"*": 4}, GUARD_S)
    assert sorted(numbers(second)) == [0, 1]
    assert {each.attempt for each in second} == {attempt}
    assert await queue.renew((*first, *second)) == set(first[:2])
    # It is no longer ours: nothing is given back twice.
    await queue.give_back(first[:2], attempt_counts=counts)
    assert not await queue.take({"*": 4}, 0)
    assert len(await world.finish(queue, (*second, *first[2:]))) == 4


async def test_attempts_are_counted_over_all_ends(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 1)
    attempts = []
    for number in range(1, 13):
        (taken,) = await queue.take({"*": 1}, GUARD_S)
        attempts.append(taken.attempt)
        if number % 3 == 0:
            await queue.give_back([taken], attempt_counts=False)
        elif number % 3 == 1:
            await queue.give_back([taken], attempt_counts=True)
        else:
            world.clock.advance(LEASE_S + 1)
            await queue.check()
    assert attempts == [1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9]


@pytest.mark.promise("batch-results")
async def test_a_result_counts_once(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 3)
    taken = await queue.take({"*": 3}, GUARD_S)
    (commits,) = await world.write(taken)
    assert await queue.commit(commits[:2]) == {0, 1}
    # The same again: the answer may have been lost. Another result: not recorded.
    assert await queue.commit(commits[:2]) == {0, 1}
    others = [Commit(each, "another", 0, ok=False) for each in taken]
    assert await queue.commit(others[:2]) == set()
    assert world.value(queue, "refused_total", reason="recorded") == 2
    assert await queue.commit(others[2:]) == {2}
    counts = await queue.counts(record)
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert world.done(record) == {
        "0": f"{commits[0].segment}:0",
        "1": f"{commits[0].segment}:1",
        "2": "another:0",
    }


async def test_commits_of_two_batches_are_refused(world: World) -> None:
    queue = await world.queue()
    for _ in range(2):
        await world.submit(queue, 1)
    taken = await queue.take({"*": 2}, GUARD_S)
    commits = [each for part in await world.write(taken) for each in part]
    with pytest.raises(ValueError, match="of one batch"):
        await queue.commit(commits)
    assert await queue.commit([]) == set()


async def test_adding_again_changes_nothing(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 700)
    validated, lines = world.batches.found[record.id]
    taken = await queue.take({"*": 10}, GUARD_S)
    await world.finish(queue, taken[:5])
    await asyncio.gather(*(queue.add(record, validated, lines) for _ in range(3)))
    rest = await world.drain(queue)
    assert numbers(rest) == list(range(10, 700))
    assert await queue.outstanding(record) == 5


async def test_an_addition_that_ended_in_the_middle_goes_on(world: World) -> None:
    queue, other = await world.queue(), await world.queue("two")
    record = batch_of()
    await world.keep(record, 1800)
    validated, lines = world.batches.found[record.id]
    # The first call of an addition, and no more: its process ended.
    first = (*batch_arguments(record, validated), 0, *line_arguments(lines[:500]))
    await queue._link.call(ADD, *first)
    # Its lines may run, but the queue does not know the whole batch.
    assert len(await world.drain(queue)) == 500
    assert await other.counts(record) is None
    assert await other.outstanding(record) is None
    await asyncio.gather(*(each.add(record, validated, lines) for each in (queue, other, queue)))
    assert await other.outstanding(record) == 1300
    assert numbers(await world.drain(queue)) == list(range(500, 1800))


async def test_a_removed_batch_is_forgotten(world: World) -> None:
    queue = await world.queue()
    record, other = await world.submit(queue, 20), await world.submit(queue, 3)
    taken = await queue.take({"*": 5}, GUARD_S)
    assert {each.batch for each in taken} == {record}
    assert await queue.remove(record) == 5
    assert await queue.counts(record) is None
    assert await queue.outstanding(record) is None
    assert await queue.renew(taken) == set(taken)
    await queue.give_back(taken, attempt_counts=True)
    assert await world.finish(queue, taken) == set()
    assert world.value(queue, "refused_total", reason="removed") == 5
    assert {each.batch for each in await world.drain(queue)} == {other}
    await queue.remove(other)
    assert await queue.remove(other) == 0
    with world.redis.client() as client:
        left = set(client.scan_iter("fleetkeeper:batch:*"))
    assert not {key for key in left if "{" in key or "turns" in key or "batches" in key}, left
    assert "fleetkeeper:batch:models" not in left


async def test_a_process_that_resigns_is_followed_at_once(world: World) -> None:
    one, two = await world.queue("a", PATIENT), await world.queue("b", PATIENT)
    assert await one.leads("batches")
    await two.resign("batches")
    assert not await two.leads("batches"), "only the process that leads can resign"
    await one.resign("batches")
    assert await two.leads("batches")


async def test_one_process_leads(world: World) -> None:
    timing = replace(PATIENT, lead_s=0.2)
    one, two = await world.queue("same", timing), await world.queue("same", timing)
    assert await one.leads("finalize:1")
    assert await two.leads("finalize:2")
    # Its lease ends some time after it stops renewing it.
    async with asyncio.timeout(GUARD_S):
        while not await two.leads("finalize:1"):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.02)
    slow = replace(PATIENT, lead_s=3600)
    three, four = await world.queue("three", slow), await world.queue("four", slow)
    assert await three.leads("rates")
    assert not await four.leads("rates")
    assert await three.leads("rates")
