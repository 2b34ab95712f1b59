"""Redis is killed, emptied, set back or replaced: the queue is rebuilt, and each line counts once."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import redis as redis_client
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.batch.model import Counts, Final, Mistake, Result, Status, Validated
from fleetkeeper_gateway.batch.queue.epochs import Claims, Patience
from fleetkeeper_gateway.batch.queue.names import FENCE_BITS
from fleetkeeper_gateway.batch.queue.server import ServerEpoch
from tests.gateway.batch.queue.world import GUARD_S, PATIENT, World, batch_of, numbers, until
from tests.support.lanes import keep_first
from tests.support.redis_server import redis_server

EPOCH = "fleetkeeper:batch:epoch"


def append_only_files(world: World) -> Path:
    """The folder with everything that the server keeps."""
    return world.redis.directory / "appendonlydir"


async def everything_is_done_once(world: World, earlier: set[int], count: int) -> None:
    """Finish what is left, with whichever process, and look at all results."""
    queue = world.queues[-1]
    rest = numbers(await world.drain(queue))
    assert sorted([*rest, *earlier]) == list(range(count))
    for record in world.batches.records.values():
        assert await queue.outstanding(record) == 0
        assert sorted(map(int, world.done(record))) == list(range(count))


@pytest.mark.promise("batch-results")
@pytest.mark.parametrize(
    "reset", keep_first(1, ["killed", "emptied", "flushed"], pytest.mark.exhaustive)
)
async def test_a_server_that_lost_everything_is_filled_from_the_store(
    world: World, reset: str
) -> None:
    one, two = await world.queue("one"), await world.queue("two")
    record = await world.submit(one, 1200)
    done = await one.take({"*": 700}, GUARD_S)
    assert len(await world.finish(one, done)) == 700
    running = await one.take({"*": 5}, GUARD_S)
    rebuilds = world.rebuilds()
    if reset == "flushed":
        with world.redis.client() as client:
            client.set("fleetkeeper:limits:other", "kept")
            client.flushall()
    else:
        world.redis.kill()
        if reset == "emptied":
            shutil.rmtree(append_only_files(world))
        world.redis.start()
    await world.until_reset(one, rebuilds + 1)
    await two.until_up(GUARD_S)
    # One process rebuilt it, and the other waited.
    assert world.rebuilds() == rebuilds + 1
    assert await two.counts(record) == Counts(1200, 700, 0)
    # Leases from before are lost, and say so.
    assert await one.renew(running) == set(running)
    (commits,) = await world.write(running[:1])
    assert await one.commit(commits) == set()
    assert world.value(one, "refused_total", reason="epoch") == 1
    taken = await two.take({"*": 5}, GUARD_S)
    assert numbers(taken) == numbers(running)
    assert {each.attempt for each in taken} == {1}
    assert min(each.fence for each in taken) > max(each.fence for each in (*running, *done))
    await two.give_back(taken, attempt_counts=False)
    await everything_is_done_once(world, set(range(700)), 1200)


async def test_a_server_set_back_forgets_nothing_that_is_in_the_store(
    world: World, tmp_path: Path
) -> None:
    """As a server that is restored from an append-only file of a minute ago."""
    one, two = await world.queue("one"), await world.queue("two")
    await world.submit(one, 300)
    await world.finish(one, await one.take({"*": 50}, GUARD_S))
    shutil.copytree(append_only_files(world), tmp_path / "earlier")
    later = [*await one.take({"*": 60}, GUARD_S), *await two.take({"*": 60}, GUARD_S)]
    await world.finish(one, later[:60])
    rebuilds = world.rebuilds()
    world.redis.kill()
    shutil.rmtree(append_only_files(world))
    shutil.copytree(tmp_path / "earlier", append_only_files(world))
    world.redis.start()
    await world.until_reset(two, rebuilds + 1)
    (again,) = await two.take({"*": 1}, GUARD_S)
    assert again.line.number == 110
    assert again.fence > max(each.fence for each in later)
    await two.give_back([again], attempt_counts=False)
    assert len(await world.finish(two, later[60:])) == 0
    await everything_is_done_once(world, set(range(110)), 300)


async def test_a_rollback_under_the_same_run_id_is_refused_by_the_scripts(world: World) -> None:
    """No connection ends, no key is absent, and no check happens before the next commit."""
    slow = replace(PATIENT, check_s=3600)
    one, two = await world.queue("one", slow), await world.queue("two", slow)
    record = await world.submit(one, 10)
    earlier = kept_by(world)
    taken = await one.take({"*": 3}, GUARD_S)
    await world.finish(one, taken[:1])
    set_back(world, earlier)
    rebuilds = world.rebuilds()
    (commits,) = await world.write(taken[1:2])
    with pytest.raises(QueueDown, match="rollback"):
        await one.commit(commits)
    assert world.value(one, "refused_total", reason="down") == 1
    await world.until_reset(one, rebuilds + 1)
    # The other process learns it from the first call.
    with pytest.raises(QueueDown, match="epoch"):
        await two.take({"*": 1}, 0)
    await two.until_up(GUARD_S)
    assert await two.counts(record) == Counts(10, 2, 0)
    await everything_is_done_once(world, {0, 1}, 10)


@pytest.mark.exhaustive
async def test_a_rollback_of_one_write_is_seen_however_much_others_wrote_since(
    world: World,
) -> None:
    slow = replace(PATIENT, check_s=3600)
    one, two = await world.queue("one", slow), await world.queue("two", slow)
    await world.submit(one, 10)
    earlier = kept_by(world)
    (taken,) = await one.take({"*": 1}, GUARD_S)
    set_back(world, earlier)
    # Two's writes were all kept, so it goes on; it even gets the same line, with the same fence.
    for _ in range(5):
        (same,) = await two.take({"*": 1}, GUARD_S)
        await two.give_back([same], attempt_counts=False)
    with pytest.raises(QueueDown, match="rollback"):
        await one.renew([taken])
    await one.until_up(GUARD_S)
    with pytest.raises(QueueDown, match="epoch"):
        await two.check()


@pytest.mark.exhaustive
async def test_the_check_finds_a_rollback_in_time(world: World) -> None:
    queue = await world.queue()
    earlier = kept_by(world)
    await queue.check()
    rebuilds = world.rebuilds()
    set_back(world, earlier)
    await world.until_reset(queue, rebuilds + 1)


@pytest.mark.exhaustive
async def test_a_process_that_starts_after_the_loss_does_not_wait_for_anybody(
    world: World,
) -> None:
    """All processes ended together with Redis. Nobody holds a claim, and patience is an hour."""
    queue = await world.queue()
    record = await world.submit(queue, 20)
    await queue.close()
    world.redis.kill()
    world.redis.start()
    again = await world.queue("again")
    assert await again.counts(record) == Counts(20, 0, 0)
    await everything_is_done_once(world, set(), 20)


async def test_another_process_goes_on_if_the_one_that_rebuilds_dies(world: World) -> None:
    queue = await world.queue("one", replace(PATIENT, patience_s=0.5))
    record = await world.submit(queue, 20)
    # A process claims the next epoch, begins, and is never seen again.
    await world.objects.create("epochs/0000000002", b"{}")
    with world.redis.client() as client:
        client.hset(EPOCH, mapping={"number": "2", "state": "rebuilding", "builder": "dead"})
    await world.until_reset(queue, 2)
    with world.redis.client() as client:
        assert client.hget(EPOCH, "number") == "3"
    assert await queue.counts(record) == Counts(20, 0, 0)
    (taken,) = await queue.take({"*": 1}, GUARD_S)
    assert taken.fence > 3 << FENCE_BITS


@pytest.mark.exhaustive
async def test_a_process_that_rebuilds_for_long_shows_progress(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 20)
    await queue.close()
    reads, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reads.set()
        await go_on.wait()

    world.batches.before_lines = wait
    world.redis.kill()
    world.redis.start()
    builder = world.begin("builder")
    async with asyncio.timeout(GUARD_S):
        await reads.wait()
    others = [world.begin(f"other-{n}") for n in range(2)]
    with world.redis.client() as client:
        await until(lambda: int(client.hget(EPOCH, "beat") or 0) >= 10, "it shows progress")
    assert not any(each.up for each in (builder, *others))
    go_on.set()
    for each in (builder, *others):
        await each.until_up(GUARD_S)
    assert world.value(builder, "rebuilds_total") == 1
    assert world.rebuilds() == 2


def test_progress_renews_patience() -> None:
    now = 0.0
    patience = Patience(30, clock=lambda: now)
    claims = Claims(2, ready=False)
    found = []
    for step in range(40):
        now = step * 20.0
        beat = min(step, 20)
        found.append(patience.ended(claims, ServerEpoch(2, ready=False, run_id="r", beat=beat)))
    # The last progress was at 400 s, and the patience ends 30 s later.
    assert found == [step * 20 >= 430 for step in range(40)]


@pytest.mark.exhaustive
async def test_redis_that_is_lost_again_in_a_rebuild_is_rebuilt_again(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 1300)
    await world.finish(queue, await queue.take({"*": 600}, GUARD_S))
    times = 0

    async def lose() -> None:
        nonlocal times
        times += 1
        if times < 4:
            world.redis.kill()
            shutil.rmtree(append_only_files(world))
            world.redis.start()

    world.batches.before_lines = lose
    rebuilds = world.rebuilds()
    world.redis.kill()
    world.redis.start()
    await world.until_reset(queue, rebuilds + 1)
    assert times == 4
    assert await queue.counts(record) == Counts(1300, 600, 0)
    await everything_is_done_once(world, set(range(600)), 1300)


@pytest.mark.exhaustive
async def test_a_store_that_fails_delays_the_rebuild(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 5)
    world.objects.down = True
    world.redis.kill()
    world.redis.start()
    failures = world.value(queue, "failures_total")
    await until(lambda: world.value(queue, "failures_total") > failures + 3, "it tries again")
    with pytest.raises(QueueDown, match="the store of this test"):
        await queue.counts(record)
    world.objects.down = False
    await queue.until_up(GUARD_S)
    await everything_is_done_once(world, set(), 5)


@pytest.mark.exhaustive
async def test_only_batches_that_have_lines_to_run_are_rebuilt(world: World) -> None:
    queue = await world.queue()
    waits = await world.submit(queue, 4)
    new, mistaken, ended, ends, cancelled = (batch_of() for _ in range(5))
    await world.batches.create(new)
    await world.batches.create(mistaken)
    mistakes = (Mistake("invalid_json_line", "not JSON", 1),)
    await world.batches.put_validated(mistaken, Validated(0, "", 0, 0, mistakes), [])
    await world.keep(ended, 5)
    await world.batches.put_final(ended, Final(Status.CANCELLED, 0, Counts()))
    await world.keep(ends, 5)
    await world.keep(cancelled, 5)
    await world.batches.cancel(cancelled, 1)

    async def end() -> None:
        # It ends, and its index is deleted, while it is rebuilt.
        await world.batches.put_final(ends, Final(Status.COMPLETED, 0, Counts()))
        world.batches.found.pop(ends.id, None)

    world.batches.before_lines = end
    rebuilds = world.rebuilds()
    world.redis.kill()
    world.redis.start()
    await world.until_reset(queue, rebuilds + 1)
    found = [await queue.counts(each) for each in (waits, new, mistaken, ended, ends, cancelled)]
    assert found == [Counts(4), None, None, None, None, None]
    assert {each.batch for each in await world.drain(queue)} == {waits}


@pytest.mark.exhaustive
async def test_a_batch_that_cannot_be_read_does_not_hold_up_the_others(world: World) -> None:
    queue = await world.queue()
    damaged, whole = await world.submit(queue, 4), await world.submit(queue, 4)
    world.batches.damaged.add(damaged.id)
    rebuilds = world.rebuilds()
    world.redis.kill()
    world.redis.start()
    with capture_logs() as logs:
        await world.until_reset(queue, rebuilds + 1)
    assert await queue.counts(whole) == Counts(4)
    assert await queue.counts(damaged) is None
    (said,) = [each for each in logs if each["log_level"] == "error"]
    assert said["batch"] == damaged.id
    # Once it can be read, it is queued as a new one.
    world.batches.damaged.clear()
    await queue.add(damaged, *world.batches.found[damaged.id])
    assert len(await world.drain(queue)) == 8


@pytest.mark.exhaustive
async def test_the_lowest_fence_counts_in_a_rebuild(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 3)
    high = await world.batches.add_segment(
        record, [Result(0, 2, 900, True, b"{}"), Result(1, 1, 901, False, b"{}")]
    )
    low = await world.batches.add_segment(
        record, [Result(2, 1, 5, True, b"{}"), Result(0, 1, 6, False, b"{}")]
    )
    same = await world.batches.add_segment(record, [Result(1, 1, 901, True, b"{}")])
    assert high < low < same
    rebuilds = world.rebuilds()
    world.redis.kill()
    world.redis.start()
    await world.until_reset(queue, rebuilds + 1)
    assert world.done(record) == {"0": f"{low}:1", "1": f"{high}:1", "2": f"{low}:0"}
    assert await queue.counts(record) == Counts(3, 1, 2)


@pytest.mark.exhaustive
async def test_fences_grow_even_if_the_store_lost_the_epochs(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 3)
    seen = (7 << FENCE_BITS) + 123
    await world.batches.add_segment(record, [Result(0, 1, seen, True, b"{}")])
    world.objects.found.clear()
    rebuilds = world.rebuilds()
    with world.redis.client() as client:
        client.flushall()
    await world.until_reset(queue, rebuilds + 1)
    taken = await queue.take({"*": 3}, GUARD_S)
    assert [each.fence for each in taken] == [seen + 1, seen + 2]
    assert await queue.renew(taken) == set()
    assert len(await world.finish(queue, taken)) == 2


@pytest.mark.exhaustive
async def test_limits_and_other_keys_stay(world: World) -> None:
    queue = await world.queue()
    await world.submit(queue, 3)
    with world.redis.client() as client:
        client.set("fleetkeeper:limits:{team/standard}:requests", "3")
        client.set("fleetkeeper:batch:{batch_old}:done", "of an earlier epoch")
        rebuilds = world.rebuilds()
        world.redis.kill()
        world.redis.start()
        await world.until_reset(queue, rebuilds + 1)
        assert client.get("fleetkeeper:limits:{team/standard}:requests") == "3"
        assert client.get("fleetkeeper:batch:{batch_old}:done") is None


@pytest.mark.exhaustive
async def test_a_copy_of_the_server_is_not_used(world: World, tmp_path: Path) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 3)
    epochs = set(world.objects.found)
    with redis_server(tmp_path / "primary") as primary, world.redis.client() as client:
        client.replicaof("127.0.0.1", str(primary.port))
        await until(lambda: not queue.up, "the queue is down")
        failures = world.value(queue, "failures_total")
        await until(lambda: world.value(queue, "failures_total") > failures + 3, "it tries again")
        assert set(world.objects.found) == epochs, "an epoch was claimed for a copy"
        client.replicaof("NO", "ONE")
        await queue.until_up(GUARD_S)
    await everything_is_done_once(world, set(), 3)
    assert await queue.counts(record) == Counts(3, 3, 0)


@pytest.mark.exhaustive
async def test_a_full_server_takes_results_and_nothing_else(world: World) -> None:
    queue = await world.queue()
    record = await world.submit(queue, 100)
    taken = await queue.take({"*": 50}, GUARD_S)
    with world.redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        with pytest.raises(QueueDown, match="maxmemory"):
            await queue.take({"*": 1}, 0)
        with pytest.raises(QueueDown, match="maxmemory"):
            await world.submit(queue, 1)
        assert await queue.renew(taken) == set()
        assert len(await world.finish(queue, taken)) == 50
        await queue.check()
        # Who leads ends batches, which frees memory.
        for _ in range(2):
            assert await queue.leads("batches")
        assert queue.up
        client.config_set("maxmemory", "0")
    assert await queue.counts(record) == Counts(100, 50, 0)
    assert len(await world.drain(queue)) == 50


def kept_by(world: World) -> dict[bytes, bytes]:
    """Everything that the server holds."""
    with redis_client.Redis(port=world.redis.port) as client:
        found = {}
        for key in client.scan_iter():
            value = client.dump(key)
            if value is not None:
                found[key] = value
    return found


def set_back(world: World, kept: dict[bytes, bytes]) -> None:
    """Let the server hold this again, in one transaction."""
    with redis_client.Redis(port=world.redis.port) as client:
        pipeline = client.pipeline(transaction=True)
        pipeline.flushall()
        for key, value in kept.items():
            pipeline.restore(key, 0, value)
        pipeline.execute()
