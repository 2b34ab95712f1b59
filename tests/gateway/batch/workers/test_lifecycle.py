"""The life of batches, with a store and a queue in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.lifecycle import leader as lifecycle
from fleetkeeper_gateway.batch.lifecycle import life
from fleetkeeper_gateway.batch.lifecycle.finalize import Finalizer
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Final, Mistake, Status
from fleetkeeper_gateway.batch.storage import create_storage, paths
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from tests.gateway.batch.workers.lifecycle_world import (
    NOW,
    MemoryQueue,
    MemoryStore,
    Stored,
    batch_record,
    leading,
)
from tests.support.batch.batch_storage import a_batch, a_validated, lines, parts_of, settings
from tests.support.guards import GUARD_S

ROUND = {"active", "queue.emptied", "queue.leads"}
"""Calls of a process that leads, and has no batch."""
EARLY = [Status.CANCELLED, Status.EXPIRED]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_PERIOD_S", 0.02)
    monkeypatch.setattr(lifecycle, "_RENEWAL_S", 0.02)
    monkeypatch.setattr(life, "_PERIOD_S", 0.02)
    monkeypatch.setattr(life, "_RETRY_S", 0.02)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def queue(store: MemoryStore) -> MemoryQueue:
    return MemoryQueue(store)


def stored(store: MemoryStore, lines: int, **changes: Any) -> BatchRecord:
    """Return a batch that was created before a process leads."""
    record = batch_record(**changes)
    store.stored[record.id] = Stored(record, lines)
    return record


# -- from its creation to its end -------------------------------------------------------------------


async def test_a_batch_is_validated_queued_and_completed(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(5)
        assert queue.adds == [(0, 1, 2)]
        world.run(record, 1)
        await world.rounds()
        assert store[record].finals == []
        world.run(record)
        final = await world.ended(record)
    assert (final.status, final.counts) == (Status.COMPLETED, Counts(5, 5, 0))
    assert store.calls.count("validate") == 1


async def test_a_batch_with_mistakes_fails(store: MemoryStore, queue: MemoryQueue) -> None:
    store.mistakes = (Mistake("bad", "wrong", 1),)
    async with leading(store, queue) as world:
        final = await world.ended(world.create())
    assert (final.status, final.counts, queue.adds) == (Status.FAILED, Counts(), [])


@pytest.mark.parametrize("status", EARLY)
@pytest.mark.parametrize("is_validated", [False, True])
async def test_a_batch_whose_end_came_while_no_process_ran_ends_at_once(
    store: MemoryStore, queue: MemoryQueue, status: Status, *, is_validated: bool
) -> None:
    is_expired = status is Status.EXPIRED
    record = stored(store, 3, expires=int(NOW) + (-5 if is_expired else 60))
    store[record].cancelled = None if is_expired else int(NOW)
    if is_validated:
        store[record].validate()
    async with leading(store, queue, end_s=2 * GUARD_S) as world:
        assert (await world.ended(record)).status is status
    assert ("validate" in store.calls, queue.adds) == (False, [])


async def test_a_cancel_does_not_wait_for_a_validation(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    """A file may be large, and those of other batches come before it."""
    begun = asyncio.Event()

    async def long(_record: BatchRecord) -> None:
        begun.set()
        await asyncio.Event().wait()

    store.before["validate"] = long
    async with leading(store, queue) as world:
        records = [world.create(number=number) for number in range(3)]
        await asyncio.wait_for(begun.wait(), GUARD_S)
        # A store that fails meanwhile does not end a validation.
        store.failing.add("cancelled_at")
        await world.rounds()
        store.failing.clear()
        await world.rounds()
        assert store.calls.count("validate") == 1
        for record in records:
            store[record].cancelled = int(NOW)
        for record in records:
            assert (await world.ended(record)).status is Status.CANCELLED


@pytest.mark.parametrize("status", EARLY)
async def test_lines_that_run_when_a_batch_ends_early_get_some_time(
    store: MemoryStore, queue: MemoryQueue, status: Status
) -> None:
    async with leading(store, queue, end_s=60.0) as world:
        record = await world.create_queued(6)
        world.run(record, 2)
        queue[record].held.add(0)
        if status is Status.EXPIRED:
            world.wall_s = record.expires + 1.0
        else:
            store[record].cancelled = int(NOW)
        await world.until("no more begin", lambda: record.id not in queue.batches)
        world.wall_s = NOW  # a clock that is set back does not bring it to life
        world.later_s += 60.0
        store[record].run(0)
        await world.rounds()
        assert store[record].finals == [], "workers have had no time to notice it"
        assert queue.batches == {}
        world.later_s += life.NOTICE_S
        final = await world.ended(record)
    assert (final.status, final.counts) == (status, Counts(6, 4, 0))


async def test_a_cancel_does_not_wait_if_no_line_runs(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue, end_s=2 * GUARD_S) as world:
        record = await world.create_queued(4)
        world.run(record, 1)
        store[record].cancelled = int(NOW)
        final = await world.ended(record)
    assert (final.status, final.counts) == (Status.CANCELLED, Counts(4, 2, 0))


async def test_lines_also_get_their_time_if_redis_forgot_the_batch(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue, end_s=2 * GUARD_S) as world:
        record = await world.create_queued(4)
        await world.rounds()
        store[record].cancelled = int(NOW)
        queue.batches.clear()
        await world.rounds()
        # What fails meanwhile does not give them their time again.
        store.failing.add("finalize")
        world.later_s += 2 * GUARD_S + life.NOTICE_S
        await world.until("it fails", lambda: store.calls.count("finalize") > 2)
        store.failing.clear()
        assert (await world.ended(record)).status is Status.CANCELLED


# -- what another process did, or did not -------------------------------------------------------------


async def test_what_one_process_began_another_goes_on_with(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(6)
        world.run(record, 1)
    assert queue.resigned == ["batches"], "so another may lead at once"
    queue.batches.clear()
    async with leading(store, queue) as world:
        await world.queued(record)
        assert queue.adds[-1] == (0, 2)
        world.run(record)
        assert (await world.ended(record)).counts == Counts(6, 6, 0)
    assert store.calls.count("validate") == 1


async def test_a_batch_that_ended_without_being_forgotten_is_forgotten(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    record = stored(store, 3)
    store[record].finals.append(Final(Status.CANCELLED, int(NOW), Counts(3)))
    await queue.add(record, "m", [0])
    async with leading(store, queue) as world:
        assert await world.ended(record) == store[record].finals[0]
    assert "validate" not in store.calls


async def test_a_list_that_is_old_brings_no_batch_to_life(
    store: MemoryStore, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(2)

        async def old() -> list[BatchRecord]:
            return [record]

        monkeypatch.setattr(store, "active", old)
        world.run(record)
        await world.ended(record)
        await world.rounds()
        calls = len(store.calls)
        await world.rounds(6)
        assert set(store.calls[calls:]) <= ROUND
    assert queue.batches == {}


async def test_a_batch_that_another_process_ends_meanwhile_does_not_stay_queued(
    store: MemoryStore, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stored(store, 2)
    store[record].validate()
    add = queue.add

    async def late(*arguments: Any) -> None:
        # The process stood still from its reading of the logs until the batch had ended.
        if not store[record].finals:
            store[record].finals.append(Final(Status.CANCELLED, int(NOW), Counts(2)))
            store[record].is_active = False
            store[record].is_damaged = True
        await add(*arguments)

    monkeypatch.setattr(queue, "add", late)
    async with leading(store, queue) as world:
        await world.until("it was added", lambda: queue.adds)
        await world.until("it is forgotten", lambda: not queue.batches)
        await world.rounds()
    assert (len(queue.adds), queue.batches, "finalize" in store.calls) == (1, {}, False)


async def test_a_batch_that_another_process_ends_while_it_waits_is_forgotten(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(2)
        store[record].finals.append(Final(Status.CANCELLED, int(NOW), Counts(2)))
        store[record].is_active = False
        await world.ended(record)
        await world.until("nothing is left of it", lambda: not world.shown[-1])
        calls = len(store.calls)
        await world.rounds()
        assert set(store.calls[calls:]) <= ROUND


async def test_a_cancel_counts_what_ran_of_a_batch_that_another_process_validated(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    begun = asyncio.Event()

    async def long(_record: BatchRecord) -> None:
        begun.set()
        await asyncio.Event().wait()

    store.before["validate"] = long
    async with leading(store, queue) as world:
        record = world.create(4)
        await asyncio.wait_for(begun.wait(), GUARD_S)
        store[record].validate()
        store[record].run(1)
        store[record].cancelled = int(NOW)
        final = await world.ended(record)
    assert (final.status, final.counts) == (Status.CANCELLED, Counts(4, 2, 0))


async def test_two_processes_that_lead_end_each_batch_once(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as one, leading(store, queue) as other:
        records = [one.create(4, number) for number in range(5)]
        other.lifecycle.wake()
        for record in records:
            await one.queued(record)
            await one.until("all is queued", lambda: len(queue[record].chunks) == 2)  # noqa: B023
            one.run(record)
        for record in records:
            final = await one.ended(record)
            await other.ended(record)
            assert (final.status, final.counts) == (Status.COMPLETED, Counts(4, 4, 0))
        await other.rounds()
        assert queue.batches == {}


async def test_a_process_that_does_not_lead_does_nothing(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(2)
        await world.until("it is shown", lambda: world.shown and world.shown[-1])
        queue.leading = False
        await world.until("nothing is shown", lambda: not world.shown[-1])
        world.run(record)
        await world.rounds()
        assert store[record].finals == []
    assert queue.resigned == []


async def test_the_lease_is_renewed_while_the_store_hangs(
    store: MemoryStore, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "active", hangs)
    async with leading(store, queue) as world:
        await asyncio.wait_for(begun.wait(), GUARD_S)
        before = store.calls.count("queue.leads")
        await world.until("it is renewed", lambda: store.calls.count("queue.leads") > before + 2)


async def test_a_leader_that_cannot_use_the_store_lets_another_lead(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders: list[MemoryQueue] = []

    async def leads(queue: MemoryQueue, _what: str) -> bool:
        leaders.extend([queue] if not leaders else [])
        return leaders == [queue]

    async def resign(queue: MemoryQueue, _what: str) -> None:
        leaders[:] = [one for one in leaders if one is not queue]

    monkeypatch.setattr(MemoryQueue, "leads", leads)
    monkeypatch.setattr(MemoryQueue, "resign", resign)
    broken = MemoryStore()
    broken.failing.add("active")
    async with leading(broken, MemoryQueue(broken)) as one:
        await one.until("it fails", lambda: "active" in broken.calls)
        async with leading(store, MemoryQueue(store)) as other:
            record = other.create(2)
            await other.rounds()
            assert "active" not in store.calls, "it may only fail for a moment"
            one.later_s += 61.0
            await other.queued(record)
            assert leaders == [other.queue]


async def test_a_leader_that_could_not_use_the_store_continues_if_no_other_leads(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(2)
        await world.rounds()
        store.failing.add("active")
        world.later_s += 61.0
        await world.until("another may lead", lambda: queue.resigned)
        world.run(record)
        await world.until("its batches live", lambda: store[record].finals)
        store.failing.clear()
        await world.ended(record)
        await world.rounds()
        resigned = len(queue.resigned)
        await world.rounds()
        assert len(queue.resigned) == resigned


# -- Redis is advice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_older_copy", [False, True])
async def test_open_chunks_are_added_again_to_a_redis_that_may_have_forgotten_them(
    store: MemoryStore, queue: MemoryQueue, *, has_older_copy: bool
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(6)
        queue[record].held.add(0)
        world.run(record, 1)
        await world.rounds()
        if has_older_copy:  # it knows the batch, and the chunk that is done
            queue.server += 1
            queue[record].chunks = {1}
        else:
            queue.batches.clear()
        await world.until("they are added", lambda: len(queue.adds) == 2)
        assert queue.adds[-1] == (0, 2)
        await world.rounds()
        assert len(queue.adds) == 2


async def test_a_lost_chunk_is_found_once_nothing_of_its_batch_runs(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(6)
        queue[record].held.add(1)
        queue[record].chunks.discard(2)
        await world.rounds()
        world.later_s += 1000.0
        await world.rounds()
        assert len(queue.adds) == 1, "something runs"
        queue[record].held.clear()
        await world.rounds()
        world.later_s += 55.0
        await world.rounds()
        assert len(queue.adds) == 1
        world.later_s += 6.0
        await world.until("it is found", lambda: queue[record].chunks == {0, 1, 2})


async def test_a_batch_is_not_ended_because_redis_says_so(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(4)
        queue[record].chunks.clear()
        queue.finished.append(record.id)
        await world.until("it is added again", lambda: len(queue.adds) == 2)
        assert queue.adds[-1] == (0, 1)
        assert store[record].finals == []


async def test_progress_of_a_batch_that_runs_is_read_now_and_then(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    async with leading(store, queue) as world:
        record = await world.create_queued(6)
        queue[record].held.add(1)
        store[record].run(0)
        await world.rounds()
        reads = store.calls.count("progress")
        world.later_s += 16.0
        await world.until("it was read", lambda: store.calls.count("progress") > reads)
        await world.until("it is shown", lambda: [one.lines for one in world.shown[-1]] == [4])
        await world.rounds()
        assert store.calls.count("progress") == reads + 1
        assert len(queue.adds) == 1


async def test_without_redis_nothing_ends_and_nothing_is_lost(
    store: MemoryStore, queue: MemoryQueue
) -> None:
    failures = metrics.QUEUE_FAILURES.labels("batch")._value
    async with leading(store, queue) as world:
        record = await world.create_queued(4)
        world.run(record, 0)
        queue.down = True
        before = failures.get()
        await world.until("it was tried", lambda: failures.get() > before + 2)
        assert [one.lines for one in world.shown[-1]] == [4]
        queue.server += 1
        queue.batches.clear()
        queue.down = False
        await world.queued(record)
        world.run(record)
        assert (await world.ended(record)).counts == Counts(4, 4, 0)


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_changed", [False, True])
async def test_a_batch_whose_index_is_damaged_fails_with_what_ran(
    store: MemoryStore, queue: MemoryQueue, *, has_changed: bool
) -> None:
    record = stored(store, 4)
    store[record].validate()
    store[record].run(0)
    store[record].is_damaged = True
    if has_changed:
        store.mistakes = (Mistake("file_not_found", "gone"),)
    async with leading(store, queue) as world:
        final = await world.ended(record)
    assert (final.status, final.counts, queue.adds) == (Status.FAILED, Counts(4, 2, 0), [])


@pytest.mark.parametrize(
    ("name", "status", "counts"),
    [
        # Nobody knows its lines any more, so it ends without them.
        (paths.VALIDATED, Status.FAILED, Counts()),
        (paths.CANCEL, Status.CANCELLED, Counts(3, 0, 0)),
        (paths.FINAL, Status.FAILED, Counts()),
    ],
)
async def test_a_batch_of_which_a_record_is_damaged_ends(
    queue: MemoryQueue, tmp_path: Path, name: str, status: Status, counts: Counts
) -> None:
    storage = create_storage(settings(f"file://{tmp_path}/store"))
    objects, files, batches = storage.objects, storage.files, storage.batches
    record = a_batch()
    await batches.create(record)
    await batches.put_validated(record, a_validated(3), lines(3))
    path = paths.batch_object(record.key_id, record.id, name)
    await objects.write(path, parts_of(b'{"at":'))
    store: Any = MemoryStore()
    a_queue: Any = queue
    ends = Finalizer(objects, files, batches, Inputs(objects, files))
    shared = life.Shared(batches, a_queue, store.validate, ends, end_s=0.0)
    async with asyncio.timeout(GUARD_S):
        await life.Life(record, shared).run()
    final, found = await batches.final(record), await batches.validated(record)
    assert final is not None
    assert found is not None
    assert (final.status, final.counts) == (status, counts)
    said = [(one.code, "damaged" in one.message) for one in (*found.mistakes, *final.mistakes)]
    assert said == [("batch_failed", True)] * (status is Status.FAILED)
    assert await batches.active_ids(record.key_id) == []
    storage.close()


@pytest.mark.parametrize(
    "call",
    [
        "active",
        "validate",
        "validated",
        "put_validated",
        "index",
        "progress",
        "cancelled_at",
        "finalize",
        "put_final",
        "final",
        "forget_active",
        "queue.add",
        "queue.state",
        "queue.emptied",
        "queue.remove",
    ],
)
async def test_a_store_or_queue_that_fails_for_a_while_loses_nothing(
    store: MemoryStore, queue: MemoryQueue, call: str
) -> None:
    async with leading(store, queue) as world:
        store.failing.add(call)
        record = world.create(4)
        before = store.calls.count(call)

        def runs() -> bool:
            if record.id in queue.batches and queue[record].chunks:
                world.run(record)
            return store.calls.count(call) >= before + 3

        await world.until("it failed three times", runs)
        store.failing.clear()
        await world.until("it ends", lambda: runs() and not store[record].is_active)
        final = await world.ended(record)
    assert (final.status, final.counts) == (Status.COMPLETED, Counts(4, 4, 0))


@pytest.mark.parametrize("call", ["validated", "validate", "progress", "finalize"])
async def test_a_batch_that_meets_a_defect_stops_no_other(
    store: MemoryStore, queue: MemoryQueue, call: str
) -> None:
    """It is counted, and tried again."""
    defects = metrics.DEFECTS.labels("batch")._value
    before = defects.get()

    async def failing(record: BatchRecord) -> None:
        if record.key_id == "bad":
            raise ValueError("a defect")

    store.before[call] = failing
    async with leading(store, queue) as world:
        bad, good = world.create(2, 1, key_id="bad"), world.create(2, 2)

        def failed_twice() -> bool:
            if bad.id in queue.batches and queue[bad].chunks:
                world.run(bad)
            return bool(defects.get() > before + 1)

        await world.until("it failed twice", failed_twice)
        await world.queued(good)
        world.run(good)
        assert (await world.ended(good)).status is Status.COMPLETED
    assert store[bad].finals == []


@pytest.mark.parametrize("call", ["validate", "progress", "finalize", "cancelled_at"])
async def test_a_key_whose_batches_take_long_leaves_a_place_to_others(
    store: MemoryStore, queue: MemoryQueue, call: str
) -> None:
    async def long(record: BatchRecord) -> None:
        if record.key_id == "slow":
            await asyncio.Event().wait()

    async with leading(store, queue) as world:
        slow = [world.create(2, number, key_id="slow") for number in range(24)]
        if call == "finalize":
            for record in slow:
                await world.queued(record)
        store.before[call] = long
        for record in slow if call == "finalize" else ():
            world.run(record)
        await world.until("they are slow", lambda: call in store.calls)
        good = await world.create_queued(2, 100)
        world.run(good)
        assert (await world.ended(good)).status is Status.COMPLETED
        assert not any(store[record].finals for record in slow)
