"""The life of batches, with a store in a directory and a queue in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Commit, QueueDown, StorageError
from fleetkeeper_gateway.batch.metrics import Backlog, Due, required_rate
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    Final,
    LineRef,
    Mistake,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.workers import lifecycle as module
from fleetkeeper_gateway.batch.workers import steps
from fleetkeeper_gateway.batch.workers.backlog import BacklogReport, route_by
from fleetkeeper_gateway.batch.workers.clock import Clock
from fleetkeeper_gateway.batch.workers.finalize import Finalizer
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lifecycle import Lifecycle
from fleetkeeper_gateway.batch.workers.steps import Known, Parts
from fleetkeeper_gateway.interfaces import Key, KeyRefused, Service
from tests.gateway.batch.workers.world import (
    GUARD_S,
    KEY,
    FailingBatches,
    MemoryQueue,
    batch_record,
    input_text,
    line_refs,
    number_of,
    output_of,
    put_batch,
    put_file,
    result,
    until,
    whole,
)
from tests.gateway.http.world import MemoryServices, service

NOW = time.time()


class Wall:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class World:
    """A process that leads, as far as batches know."""

    def __init__(self, storage: Storage, queue: MemoryQueue, end_s: float = 60.0) -> None:
        self.storage, self.queue, self.end_s = storage, queue, end_s
        self.batches = FailingBatches(storage)
        self.wall = Wall()
        self.mistakes: tuple[Mistake, ...] = ()
        self.validations: list[str] = []
        self.may_validate = asyncio.Event()
        self.may_validate.set()
        self.looked: list[Sequence[Known]] = []
        self.monotonic_s = 1000.0
        self.lifecycle: Lifecycle
        self.task: asyncio.Task[None]

    async def validate(self, record: BatchRecord) -> tuple[Validated, Sequence[LineRef]]:
        self.validations.append(record.id)
        await self.may_validate.wait()
        path = self.storage.files.data_path(record.key_id, record.input_file)
        text = await self.storage.objects.read(path)
        assert text is not None
        refs = [] if self.mistakes else line_refs(text)
        model = "" if self.mistakes else "m"
        return Validated(len(refs), model, 100 * len(refs), int(NOW), self.mistakes), refs

    def begin(self) -> None:
        storage = self.storage
        finalizer = Finalizer(
            storage.objects,
            storage.files,
            self.batches,
            Inputs(storage.objects, storage.files),
        )
        parts = Parts(self.batches, self.queue, finalizer, self.validate, self.looked.append)
        self.lifecycle = Lifecycle(
            parts,
            wall=Clock(self.wall),
            monotonic=lambda: self.monotonic_s + time.monotonic(),
            end_s=self.end_s,
        )
        self.task = asyncio.create_task(self.lifecycle.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def create(self, lines: int = 3, **changes: Any) -> BatchRecord:
        record = batch_record(**changes)
        await put_file(self.storage, record, input_text(lines))
        assert await self.storage.batches.create(record)
        self.lifecycle.wake()
        return record

    async def complete(self, record: BatchRecord, *numbers: int) -> None:
        """Run lines of a batch as a worker does."""
        taken = [one for one in await self.queue.take({"*": 1000}, 0) if one.batch == record]
        chosen = [one for one in taken if one.line.number in numbers or not numbers]
        others = [one for one in taken if one not in chosen]
        await self.queue.give_back(others, attempt_counts=False)
        segment = await self.storage.batches.add_segment(
            record, [result(one.line.number, one.fence) for one in chosen]
        )
        await self.queue.commit(
            [Commit(one, segment, offset, True) for offset, one in enumerate(chosen)]
        )

    async def queued(self, record: BatchRecord) -> None:
        await until("it is queued", lambda: record.id in self.queue.batches)

    async def ended(self, record: BatchRecord) -> Final:
        async def gone() -> bool:
            assert not self.task.done(), self.task
            return not await self.storage.batches.active() and record.id not in self.queue.batches

        await until("it has ended", gone)
        final = await self.storage.batches.final(record)
        assert final is not None
        return final


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD_S", 0.02)
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(steps, "RETRY_S", 0.02)


@asynccontextmanager
async def leading(storage: Storage, queue: MemoryQueue, **changes: Any) -> AsyncIterator[World]:
    world = World(storage, queue, **changes)
    world.begin()
    try:
        yield world
    finally:
        await world.end()


async def test_a_batch_is_validated_queued_and_completed(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(5)
        await world.queued(record)
        await world.complete(record)
        final = await world.ended(record)
        assert (final.status, final.counts) == (Status.COMPLETED, Counts(5, 5, 0))
        output = await output_of(storage, record, final.output_file)
        assert [number_of(line) for line in output] == list(range(5))
        assert world.validations == [record.id]
        assert [one async for one in storage.batches.results(record)] == []


async def test_a_batch_with_mistakes_fails(storage: Storage, queue: MemoryQueue) -> None:
    async with leading(storage, queue) as world:
        world.mistakes = (Mistake("bad", "wrong", 1),)
        record = await world.create()
        final = await world.ended(record)
        assert (final.status, final.counts, final.output_file) == (Status.FAILED, Counts(), None)
        assert queue.batches == {}


async def test_a_batch_is_cancelled_while_it_is_validated_or_before(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        queue.leading = False
        record = await world.create()
        await storage.batches.cancel(record, int(NOW))
        queue.leading = True
        assert (await world.ended(record)).status is Status.CANCELLED
        assert world.validations == []


async def test_lines_that_run_at_a_cancel_get_some_time(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(4)
        await world.queued(record)
        await world.complete(record, 2)
        (running, *_) = await queue.take({"*": 1}, 0)
        await storage.batches.cancel(record, int(NOW))
        await until("no more are taken", lambda: record.id not in queue.batches)
        await storage.batches.add_segment(record, [result(running.line.number, running.fence)])
        await asyncio.sleep(0.2)
        assert await storage.batches.final(record) is None
        world.monotonic_s += 60.0
        final = await world.ended(record)
        assert (final.status, final.counts) == (Status.CANCELLED, Counts(4, 2, 0))
        output = await output_of(storage, record, final.output_file)
        errors = await output_of(storage, record, final.error_file)
        assert [number_of(line) for line in output] == sorted({2, running.line.number})
        assert sorted(map(number_of, output + errors)) == list(range(4))
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


async def test_a_cancel_does_not_wait_if_no_line_runs(storage: Storage, queue: MemoryQueue) -> None:
    async with leading(storage, queue, end_s=2 * GUARD_S) as world:
        record = await world.create(4)
        await world.queued(record)
        await world.complete(record, 2)
        await storage.batches.cancel(record, int(NOW))
        final = await world.ended(record)
        assert (final.status, final.counts) == (Status.CANCELLED, Counts(4, 1, 0))


async def test_a_batch_expires_and_a_clock_set_back_does_not_bring_it_to_life(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(3)
        await world.queued(record)
        assert await queue.take({"*": 1}, 0)
        world.wall.now = record.expires + 1.0
        await until("no more are taken", lambda: record.id not in queue.batches)
        world.wall.now = NOW
        rounds = len(world.looked)
        await until("it was looked at again", lambda: len(world.looked) > rounds + 3)
        assert record.id not in queue.batches
        world.monotonic_s += 60.0
        final = await world.ended(record)
        assert final.status is Status.EXPIRED
        errors = await output_of(storage, record, final.error_file)
        assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 3


def test_the_clock_never_goes_back() -> None:
    wall = Wall()
    clock = Clock(wall)
    assert clock() == NOW
    wall.now = NOW + 100.0
    assert clock() == NOW + 100.0
    wall.now = NOW - 100.0
    assert clock() == NOW + 100.0


async def test_a_batch_whose_window_ended_while_nobody_ran_it_expires_at_once(
    storage: Storage, queue: MemoryQueue
) -> None:
    record, _, _ = await put_batch(storage, 3, expires=int(NOW) - 5)
    async with leading(storage, queue) as world:
        assert (await world.ended(record)).status is Status.EXPIRED


async def test_what_one_process_began_another_goes_on_with(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        world.may_validate.clear()
        record = await world.create(4)
        await until("it is validated", lambda: len(world.validations) == 1)
    async with leading(storage, queue) as world:
        await world.queued(record)
        await world.complete(record, 1, 3)
    queue.batches.clear()
    async with leading(storage, queue) as world:
        await world.queued(record)
        await world.complete(record)
        assert (await world.ended(record)).counts == Counts(4, 4, 0)


async def test_a_batch_that_ended_without_being_forgotten_is_forgotten(
    storage: Storage, queue: MemoryQueue
) -> None:
    record, validated, refs = await put_batch(storage, 3)
    await queue.add(record, validated, refs)
    kept = await storage.batches.put_final(record, Final(Status.CANCELLED, int(NOW), Counts(3)))
    async with leading(storage, queue) as world:
        assert await world.ended(record) == kept
        assert world.validations == []


async def test_a_list_that_is_old_brings_no_batch_to_life(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(2)
        await world.queued(record)

        async def old() -> list[BatchRecord]:
            return [record]

        monkeypatch.setattr(world.lifecycle, "_batches", SimpleNamespace(active=old))
        await world.complete(record)
        await until("it is over", lambda: record.id not in queue.batches)
        calls, rounds = len(world.batches.calls), len(world.looked)
        await until("it was listed again", lambda: len(world.looked) > rounds + 5)
        assert len(world.batches.calls) == calls
        assert queue.batches == {}


async def test_a_batch_that_another_process_ends_meanwhile_is_not_queued_again(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _, _ = await put_batch(storage, 2)
    add, added = queue.add, asyncio.Event()

    async def late(*arguments: Any) -> None:
        # The process stood still from its look at the queue until the batch had ended.
        await storage.batches.put_final(record, Final(Status.CANCELLED, int(NOW), Counts(2)))
        await storage.batches.forget_active(record)
        await add(*arguments)
        added.set()

    monkeypatch.setattr(queue, "add", late)
    async with leading(storage, queue) as world:
        await asyncio.wait_for(added.wait(), GUARD_S)
        rounds = len(world.looked)
        await until("it was looked at", lambda: len(world.looked) > rounds + 3)
        assert queue.batches == {}


async def test_redis_forgets_a_batch_although_it_was_down_at_its_end(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, failures = queue.remove, [QueueDown("the test says so")] * 2

    async def failing(record: BatchRecord) -> int:
        if failures:
            raise failures.pop()
        return await remove(record)

    monkeypatch.setattr(queue, "remove", failing)
    async with leading(storage, queue) as world:
        record = await world.create(2)
        await world.queued(record)
        await world.complete(record)
        await until("it is forgotten", lambda: record.id not in queue.batches)
        await world.ended(record)


async def _damage_index(storage: Storage, record: BatchRecord) -> None:
    found = await storage.objects.list(f"keys/{record.key_id}/batches/{record.id}/")
    (path,) = [one.path for one in found if "/lines-" in one.path]
    await storage.objects.write(path, whole(b"damaged"))


async def test_a_batch_whose_index_is_damaged_is_read_again(
    storage: Storage, queue: MemoryQueue
) -> None:
    record, _, _ = await put_batch(storage, 3)
    await _damage_index(storage, record)
    async with leading(storage, queue) as world:
        await world.queued(record)
        await world.complete(record)
        assert (await world.ended(record)).counts == Counts(3, 3, 0)


async def test_a_batch_whose_lines_cannot_be_found_any_more_fails(
    storage: Storage, queue: MemoryQueue
) -> None:
    record, _, _ = await put_batch(storage, 3)
    await storage.batches.add_segment(record, [result(1)])
    await _damage_index(storage, record)
    async with leading(storage, queue) as world:
        world.mistakes = (Mistake("file_not_found", "gone"),)
        final = await world.ended(record)
    assert (final.status, final.counts) == (Status.FAILED, Counts(3, 1, 0))
    output = await output_of(storage, record, final.output_file)
    assert [number_of(line) for line in output] == [1]
    errors = await output_of(storage, record, final.error_file)
    assert [line["error"]["code"] for line in errors] == ["batch_failed"] * 2


async def test_results_that_the_store_lost_are_computed_again(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(3)
        await world.queued(record)
        before = queue.batches[record.id]
        taken = await queue.take({"*": 3}, 0)
        await queue.commit([Commit(one, "lost", 0, True) for one in taken])
        await until(
            "the queue is told anew", lambda: queue.batches.get(record.id, before) is not before
        )
        await world.complete(record)
        assert (await world.ended(record)).counts == Counts(3, 3, 0)


@pytest.mark.parametrize(
    "call",
    [
        "active",
        "validated",
        "put_validated",
        "lines",
        "cancelled_at",
        "put_final",
        "final",
        "forget_active",
    ],
)
async def test_a_store_that_fails_for_a_while_loses_nothing(
    storage: Storage, queue: MemoryQueue, call: str
) -> None:
    async with leading(storage, queue) as world:
        world.batches.failing.add(call)
        record = await world.create(3)
        before = world.batches.calls.count(call)

        async def tried() -> bool:
            if record.id in queue.batches and await queue.outstanding(record):
                await world.complete(record)
            return world.batches.calls.count(call) >= before + 3

        await until("it failed three times", tried)
        has_ended = await storage.batches.final(record) is not None
        world.batches.failing.clear()
        if not has_ended:
            await world.queued(record)
            if await queue.outstanding(record):
                await world.complete(record)
        assert (await world.ended(record)).status is Status.COMPLETED


async def test_without_redis_nothing_ends_and_nothing_is_lost(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(2)
        await world.queued(record)
        await world.complete(record, 0)
        queue.down = True
        await asyncio.sleep(0.2)
        assert not world.task.done()
        queue.down = False
        await world.complete(record)
        assert (await world.ended(record)).counts == Counts(2, 2, 0)


async def test_a_process_that_does_not_lead_does_nothing(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        record = await world.create(2)
        await world.queued(record)
        await until("it is shown", lambda: bool(world.looked and world.looked[-1]))
        queue.leading = False
        await until("nothing is shown", lambda: not world.looked[-1])
        await world.complete(record)
        await asyncio.sleep(0.2)
        assert await storage.batches.final(record) is None


async def test_a_process_that_ends_lets_another_lead_at_once(
    storage: Storage, queue: MemoryQueue
) -> None:
    async with leading(storage, queue) as world:
        await until("it leads", lambda: bool(world.looked))
    assert queue.resigned == ["batches"]
    queue.leading = False
    async with leading(storage, queue) as world:
        await until("it does not lead", lambda: bool(world.looked))
    assert queue.resigned == ["batches"]


async def test_who_leads_leads_on_while_looks_take_long(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "RENEWAL_S", 0.02)
    leads, leases = queue.leads, []

    async def noted(what: str) -> bool:
        leases.append(what)
        return await leads(what)

    monkeypatch.setattr(queue, "leads", noted)
    async with leading(storage, queue) as world:
        may_look, looks = asyncio.Event(), asyncio.Event()

        async def slow(_record: BatchRecord) -> None:
            looks.set()
            await may_look.wait()

        monkeypatch.setattr(world.batches, "cancelled_at", slow, raising=False)
        await put_batch(storage, 1)
        await asyncio.wait_for(looks.wait(), GUARD_S)
        before = leases.count("batches")
        await until("its lease is renewed", lambda: leases.count("batches") > before + 2)
        may_look.set()


async def test_a_validation_that_fails_is_done_again(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(storage, queue) as world:
        errors: list[Exception] = [StorageError("away"), RuntimeError("a defect")]
        validate = world.validate

        async def failing(record: BatchRecord) -> tuple[Validated, Sequence[LineRef]]:
            if errors:
                raise errors.pop()
            return await validate(record)

        world.lifecycle._steps._validate = failing
        record = await world.create(2)
        await world.queued(record)
        assert errors == []


@pytest.mark.parametrize("call", ["validated", "cancelled_at"])
async def test_a_batch_that_meets_a_defect_stops_no_other(
    storage: Storage, queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is counted, and tried again."""
    defects = metrics.DEFECTS.labels("batch")._value
    before = defects.get()
    async with leading(storage, queue) as world:
        found = getattr(world.batches, call)

        async def failing(record: BatchRecord) -> Any:
            if record.key_id == "bad":
                raise ValueError("a defect")
            return await found(record)

        monkeypatch.setattr(world.batches, call, failing, raising=False)
        bad = await world.create(2, number=1, key_id="bad")
        await until("it failed", lambda: defects.get() > before)
        await until("it failed again", lambda: defects.get() > before + 1)
        await world.queued(await world.create(2, number=2))
        assert bad.id not in queue.batches


# -- what waits for a service -----------------------------------------------------------------------


class NamedKeys:
    """Keys by their ID."""

    synced = True

    def __init__(self, *keys: Key) -> None:
        self._keys = {key.id: key for key in keys}

    def named(self, key_id: str, now: float) -> Key:  # noqa: ARG002 - as Keys has it
        if key_id not in self._keys:
            raise KeyRefused("invalid_api_key", "no", key_id)
        return self._keys[key_id]


def known(number: int, outstanding: int | None, expires: float, **changes: Any) -> Known:
    validated = Validated(100, changes.pop("model", "m"), 50_000, 0)
    record = batch_record(number, expires=int(expires), **changes)
    return Known(record, validated, outstanding)


def series(backlog: Backlog) -> dict[str, float]:
    return {
        f"{metric.name} {'/'.join(sample.labels.values())}": sample.value
        for metric in backlog.collect()
        for sample in metric.samples
    }


def test_what_is_left_is_shown_by_the_service_that_the_gateway_chooses() -> None:
    services, backlog = MemoryServices(), Backlog()
    other: Service = service("other", models=("n",))
    services.set(service(), other)
    keys = NamedKeys(Key(KEY, "k", frozenset({"team"})), Key("key-2", "k", frozenset({"x"})))
    report = BacklogReport(backlog, services, keys, lambda: NOW)  # type: ignore[arg-type]
    assert series(backlog) == {}
    report(
        [
            known(1, 40, NOW + 100),
            known(2, 20, NOW + 10),
            known(3, 100, NOW + 1000, model="n"),
            known(4, 0, NOW + 5),
            known(5, None, NOW + 5),
            known(6, 9, NOW + 5, key_id="key-2"),
            known(7, 9, NOW + 5, key_id="gone"),
            known(8, 9, NOW + 5, model="unknown"),
            Known(batch_record(9)),
        ]
    )
    deadline = int(NOW + 10)
    found = series(backlog)
    assert found.pop("fleetkeeper_batch_required_tokens_per_second team/chat") == pytest.approx(
        10_000 / (deadline - NOW)
    )
    assert found.pop("fleetkeeper_batch_required_tokens_per_second team/other") == pytest.approx(
        50_000 / (int(NOW + 1000) - NOW)
    )
    assert found == {
        "fleetkeeper_batch_backlog_tokens team/chat": 30_000,
        "fleetkeeper_batch_backlog_tokens team/other": 50_000,
        "fleetkeeper_batch_remaining_lines team/chat": 60,
        "fleetkeeper_batch_remaining_lines team/other": 100,
        "fleetkeeper_batch_deadline_timestamp_seconds team/chat": deadline,
        "fleetkeeper_batch_deadline_timestamp_seconds team/other": int(NOW + 1000),
    }
    report([])
    assert series(backlog) == {}
    services.synced = False
    report([known(1, 40, NOW + 100)])
    assert series(backlog) == {}


def test_a_route_is_the_service_that_the_gateway_chooses_or_the_flow() -> None:
    """Models of two services may have one name; it says nothing about where a line goes."""
    services = MemoryServices()
    services.set(service(), service(namespace="other"))
    keys = NamedKeys(
        Key(KEY, "k", frozenset({"team"})),
        Key("key-2", "k", frozenset({"other"})),
        Key("key-3", "k", frozenset({"x"})),
    )
    route = route_by(services, keys, lambda: NOW)  # type: ignore[arg-type]
    assert route(KEY, "m") == "service team/chat"
    assert route("key-2", "m") == "service other/chat"
    assert route("key-3", "m") == "key-3/m"
    services.synced = False
    assert route(KEY, "m") == f"{KEY}/m"
    alone = route_by(None, keys, lambda: NOW)  # type: ignore[arg-type]
    assert alone(KEY, "m") == f"{KEY}/m"


def test_a_batch_whose_service_cannot_be_found_hides_no_other() -> None:
    class BrokenKeys(NamedKeys):
        def named(self, key_id: str, now: float) -> Key:
            if key_id == "bad":
                raise ValueError("a defect")
            return super().named(key_id, now)

    defects = metrics.DEFECTS.labels("backlog")._value
    before = defects.get()
    services, backlog = MemoryServices(), Backlog()
    services.set(service())
    keys = BrokenKeys(Key(KEY, "k", frozenset({"team"})))
    report = BacklogReport(backlog, services, keys, lambda: NOW)  # type: ignore[arg-type]
    report([known(1, 9, NOW + 100, key_id="bad"), known(2, 40, NOW + 100)])
    assert series(backlog)["fleetkeeper_batch_remaining_lines team/chat"] == 40
    assert defects.get() == before + 1


@pytest.mark.parametrize(
    ("due", "rate"),
    [
        ([], 0.0),
        ([Due(1, 100, 10.0)], 10.0),
        ([Due(1, 300, 20.0), Due(1, 100, 10.0)], 20.0),
        ([Due(1, 10, 20.0), Due(1, 400, 10.0)], 40.0),
        ([Due(1, 100, -50.0)], 100.0),
    ],
)
def test_the_rate_meets_every_deadline(due: list[Due], rate: float) -> None:
    assert required_rate(due, 0.0) == rate
