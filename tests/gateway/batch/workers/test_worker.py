"""The worker, with a store in a directory and a queue in memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Answer, NotAnswered, StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Result
from fleetkeeper_gateway.batch.queue.names import fence_base
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.workers import attempt as attempt_module
from fleetkeeper_gateway.batch.workers import recorder as recorder_module
from fleetkeeper_gateway.batch.workers import worker as worker_module
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lines import Request
from fleetkeeper_gateway.batch.workers.worker import Worker
from tests.gateway.batch.workers.world import (
    GUARD_S,
    FailingBatches,
    MemoryQueue,
    ScriptedSender,
    ok,
    put_batch,
    until,
)


class Running:
    """A worker that runs."""

    def __init__(self, storage: Storage, queue: MemoryQueue, sender: ScriptedSender) -> None:
        self.storage, self.queue, self.sender = storage, queue, sender
        self.batches = FailingBatches(storage)
        self.worker: Worker
        self.inputs: Inputs
        self.task: asyncio.Task[None]

    async def batch(self, lines: int, number: int = 0, **changes: Any) -> BatchRecord:
        record, validated, refs = await put_batch(self.storage, lines, number, **changes)
        await self.queue.add(record, validated, refs)
        return record

    async def done(self, record: BatchRecord) -> None:
        await until("all lines have results", lambda: self._is_done(record))

    async def _is_done(self, record: BatchRecord) -> bool:
        assert not self.task.done(), self.task
        return self.queue.down is False and await self.queue.outstanding(record) == 0

    async def results(self, record: BatchRecord) -> list[Result]:
        return [one async for _, found in self.storage.batches.results(record) for one in found]

    async def stop(self) -> None:
        self.worker.stop()
        async with asyncio.timeout(GUARD_S):
            await self.task


@asynccontextmanager
async def working(
    storage: Storage,
    queue: MemoryQueue,
    sender: ScriptedSender,
    *,
    concurrency: int = 32,
    drain_s: float = GUARD_S,
    end_s: float = 0.1,
) -> AsyncIterator[Running]:
    found = Running(storage, queue, sender)
    inputs = found.inputs = Inputs(storage.objects, storage.files)
    found.worker = Worker(
        queue,
        found.batches,
        inputs,
        sender,
        concurrency=concurrency,
        drain_s=drain_s,
        end_s=end_s,
    )
    found.task = asyncio.create_task(found.worker.run())
    try:
        yield found
    finally:
        await found.stop()


async def test_every_line_gets_one_result_in_few_segments(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async with working(storage, queue, sender) as running:
        record = await running.batch(300)
        await running.done(record)
        results = await running.results(record)
        assert sorted(one.line for one in results) == list(range(300))
        assert all(one.ok and one.attempt == 1 for one in results)
        line = json.loads(results[0].text)
        assert line["custom_id"] == f"c-{results[0].line}"
        assert line["response"]["body"]["number"] == results[0].line
        assert running.batches.calls.count("add_segment") <= 30
        assert sender.most <= 32
        await until("nothing is held", lambda: running.worker.held == 0)


async def test_a_commit_names_the_place_of_its_result(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async with working(storage, queue, sender) as running:
        record = await running.batch(150)
        await running.done(record)
        segments = {name: found async for name, found in storage.batches.results(record)}
        for number, commit in queue.batches[record.id].done.items():
            found = segments[commit.segment][commit.offset]
            assert (found.line, found.fence) == (number, commit.taken.fence)


async def test_no_more_lines_are_taken_than_may_run(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    held = asyncio.Event()

    async def script(number: int) -> Answer:
        await held.wait()
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender, concurrency=10) as running:
        record = await running.batch(100)
        await until("it is full", lambda: sender.running == 10)
        assert running.worker.held <= 12
        assert all(sum(free.values()) <= 12 for free in queue.takes)
        held.set()
        await running.done(record)
        assert sender.most == 10


async def test_an_answer_that_would_be_the_same_again_is_a_result(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async def script(number: int) -> Answer:
        return Answer(404, b'{"error": {"code": "model_not_found"}}', "r")

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(3)
        await running.done(record)
        results = await running.results(record)
        assert [one.ok for one in results] == [False] * 3
        assert json.loads(results[0].text)["response"]["status_code"] == 404
        assert queue.given_back == []


@pytest.mark.parametrize(
    "ending", [Answer(500, b"", "r"), NotAnswered("the connection broke", sent=True)]
)
async def test_five_attempts_that_ended_an_engine_make_an_error_line(
    storage: Storage,
    queue: MemoryQueue,
    sender: ScriptedSender,
    ending: Answer | NotAnswered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_AGAIN_S", 0.001)

    async def script(number: int) -> Answer:
        if number != 1:
            return ok(number)
        if isinstance(ending, Answer):
            return ending
        raise ending

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(3)
        await running.done(record)
        assert sender.sent.count(1) == 5
        assert queue.given_back == [(1, True)] * 4
        (failed,) = [one for one in await running.results(record) if not one.ok]
        assert (failed.line, failed.attempt) == (1, 5)
        assert json.loads(failed.text)["error"]["code"] == "engine_failed"


async def test_a_line_that_failed_waits_longer_each_time_and_takes_no_place(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that answers 500 until it is replaced must not use up five attempts in seconds."""
    monkeypatch.setattr(worker_module, "_AGAIN_S", 0.1)
    sent: list[float] = []

    async def script(number: int) -> Answer:
        if number != 0:
            return ok(number)
        sent.append(time.monotonic())
        return Answer(500, b"", "r") if len(sent) < 4 else ok(number)

    sender.script = script
    async with working(storage, queue, sender, concurrency=1) as running:
        record = await running.batch(3)
        await running.done(record)
        assert sender.sent[:4] == [0, 1, 2, 0], "the others ran meanwhile"
        pauses = [after - before for before, after in itertools.pairwise(sent)]
        assert all(found >= least for found, least in zip(pauses, (0.1, 0.4, 1.6), strict=True)), (
            pauses
        )


async def test_a_line_that_pauses_is_given_back_at_the_end(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async def script(number: int) -> Answer:
        return Answer(500, b"", "r")

    sender.script = script
    async with working(storage, queue, sender) as running:
        await running.batch(1)
        await until("it pauses", lambda: not running.worker._slots and running.worker.held == 1)
        assert queue.given_back == []
    assert queue.given_back[0] == (0, True), "the worker may meet it again while it stops"


@pytest.mark.parametrize(
    "refusal",
    [
        Answer(429, b"{}", "r", 0.01),
        Answer(503, b"{}", "r", 0.01),
        NotAnswered("cannot connect", sent=False),
    ],
)
async def test_a_refusal_is_no_attempt(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, refusal: Answer | NotAnswered
) -> None:
    seen: Counter[int] = Counter()

    async def script(number: int) -> Answer:
        seen[number] += 1
        if number == 0 and seen[number] <= 3:
            if isinstance(refusal, Answer):
                return refusal
            raise refusal
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(2)
        await running.done(record)
        assert queue.given_back == [(0, False)] * 3
        assert [one.attempt for one in await running.results(record)] == [1, 1]


async def test_a_key_at_its_limit_does_not_stop_the_others(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_REST_S", 0.05)
    limited = Answer(429, b"{}", "r", 60.0, refused="rate_limit_exceeded")

    class ByKey(ScriptedSender):
        async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
            answer = await super().send(key_id, endpoint, body)
            return limited if key_id == "limited" else answer

    async with working(storage, queue, ByKey()) as running:
        slow = await running.batch(50, 1, key_id="limited")
        record = await running.batch(50, 2)
        await running.done(record)
        assert await queue.outstanding(slow) == 50
        paces = running.worker.paces.all().values()
        assert {pace.limit for pace in paces} == {32.0}, "the service refused nothing"
        assert len(running.sender.sent) <= 50 + 33


@pytest.mark.parametrize("status", [401, 429])
async def test_a_service_that_answers_as_the_gateway_does_rests_no_key(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, status: int
) -> None:
    """Else one service would stop the lines of its key for all other services."""
    body = b'{"error": {"code": "rate_limit_exceeded"}}'

    async def script(number: int) -> Answer:
        await asyncio.sleep(0)
        return Answer(status, body, "r", 300.0)

    sender.script = script
    async with working(storage, queue, sender) as running:
        await running.batch(1)
        await until("it was refused", lambda: queue.given_back != [])
        assert queue.given_back[0] == (0, False)
        assert running.worker._rests == {}


@pytest.mark.parametrize("route", [None, lambda key, _model: f"service of {key}"])
async def test_a_service_that_refuses_slows_down_no_service_of_the_same_model_name(
    storage: Storage,
    queue: MemoryQueue,
    sender: ScriptedSender,
    route: Callable[[str, str], str] | None,
) -> None:
    """Two tenants may give their models one name. One of the services is suspended."""

    class ByKey(ScriptedSender):
        async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
            answer = await super().send(key_id, endpoint, body)
            return Answer(503, b"", "r", 300.0) if key_id == "suspended" else answer

    sender = ByKey()
    async with working(storage, queue, sender) as running:
        if route is not None:
            running.worker._route = route
        slow = await running.batch(500, 1, key_id="suspended")
        await until("it was refused", lambda: bool(queue.given_back))
        record = await running.batch(500, 2)
        await running.done(record)
        assert await queue.outstanding(slow) == 500
        assert len(sender.sent) <= 500 + 33, "a route that rests is not asked for lines"
        (refused,) = [pace for name, pace in running.worker.paces.all().items() if "susp" in name]
        assert refused.limit < 32.0


async def test_keys_of_one_service_share_its_pace(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async with working(storage, queue, sender) as running:
        running.worker._route = lambda _key, _model: "the service"
        for number, key in enumerate(("key-1", "key-2")):
            await running.done(await running.batch(20, number, key_id=key))
        assert set(running.worker.paces.all()) == {"the service"}


async def test_a_route_that_cannot_be_found_for_one_key_stops_no_other(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    defects = metrics.DEFECTS.labels("route")._value
    before = defects.get()

    def route(key_id: str, _model: str) -> str:
        if key_id == "bad":
            raise ValueError("a defect")
        return "service"

    async with working(storage, queue, sender) as running:
        running.worker._route = route
        for number, key in enumerate(("bad", "good")):
            await running.done(await running.batch(3, number, key_id=key))
        assert set(running.worker.paces.all()) == {"bad/m", "service"}
    assert defects.get() > before


async def test_a_key_rests_for_a_bounded_time(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_REST_S", 0.05)
    monkeypatch.setattr(attempt_module, "LONGEST_REST_S", 0.05)
    limits = [Answer(429, b"{}", "r", 1e8, refused="rate_limit_exceeded")]

    async def once(number: int) -> Answer:
        return limits.pop() if limits else ok(number)

    sender.script = once
    async with working(storage, queue, sender) as running:
        await running.done(await running.batch(1))


async def test_a_line_waits_while_the_upstream_does_not_know_who_asks(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is wrong or a Secret that is not mounted yet says nothing about the line."""
    monkeypatch.setattr(worker_module, "_REST_S", 0.05)
    monkeypatch.setattr(attempt_module, "UNKNOWN_REST_S", 0.05)
    unknown = [Answer(401, b"{}", "r", refused="invalid_api_key") for _ in range(20)]

    async def later(number: int) -> Answer:
        return unknown.pop() if unknown else ok(number)

    sender.script = later
    async with working(storage, queue, sender) as running:
        record = await running.batch(3)
        await running.done(record)
        assert (await queue.counts(record)) == Counts(3, completed=3)
    assert unknown == []


async def test_lines_that_cannot_be_read_are_not_tried_without_a_pause(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object) -> Request:
        raise StorageError("the test says so")

    async with working(storage, queue, sender) as running:
        monkeypatch.setattr(running.inputs, "request", failing)
        await running.batch(1)
        await until("it was given back", lambda: bool(queue.given_back))
        pauses = running.worker._rests
        assert pauses["key-1"] > time.monotonic()
        monkeypatch.undo()
        pauses.clear()


async def test_while_the_store_fails_results_stay_and_no_lines_are_taken(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    async with working(storage, queue, sender) as running:
        running.batches.failing.add("add_segment")
        record = await running.batch(500)
        await until("writing failed often", lambda: running.batches.calls.count("add_segment") > 5)
        taken = queue.fence
        computed = len(sender.sent)
        renewed = queue.renewed
        await until("leases are renewed", lambda: queue.renewed > renewed + 5)
        assert (queue.fence, len(sender.sent)) == (taken, computed)
        assert 0 < taken < 500
        running.batches.failing.clear()
        await running.done(record)
        assert len(sender.sent) == 500, "nothing was computed twice"


async def test_while_redis_is_down_results_are_kept_and_committed_later(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_FIRST_PAUSE_S", 0.01)
    held = asyncio.Event()

    async def script(number: int) -> Answer:
        await held.wait()
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(10)
        await until("all run", lambda: sender.running == 10)
        queue.down = True
        held.set()
        await until("segments are written", lambda: "add_segment" in running.batches.calls)
        await asyncio.sleep(0.1)
        queue.down = False
        await running.done(record)
        assert len(sender.sent) == 10
        assert running.batches.calls.count("add_segment") == 1


async def test_a_line_that_another_process_got_too_has_one_result(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    held = asyncio.Event()

    async def script(number: int) -> Answer:
        if sender.sent.count(number) == 1:
            await held.wait()
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(5)
        await until("all run", lambda: sender.running == 5)
        queue.expire()
        await running.done(record)
        held.set()
        await until("nothing is held", lambda: running.worker.held == 0)
        assert len(queue.batches[record.id].done) == 5
        assert {commit.taken.fence > 5 for commit in queue.batches[record.id].done.values()} == {
            True
        }


async def test_lines_of_a_batch_that_is_gone_end_after_a_time(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)

    async def script(number: int) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(5)
        await until("all run", lambda: sender.running == 5)
        await queue.remove(record)
        await until("all ended", lambda: sender.running == 0 and running.worker.held == 0)


async def test_at_the_end_lines_that_run_are_finished_and_others_given_back(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    held = asyncio.Event()

    async def script(number: int) -> Answer:
        await held.wait()
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender, concurrency=10) as running:
        record = await running.batch(50)
        await until("it is full", lambda: sender.running == 10)
        running.worker.stop()
        await until("it has noticed", running.worker._stopping.is_set)
        held.set()
        await running.task
        done = queue.batches[record.id].done
        assert len(done) == 10
        assert len(queue.batches[record.id].waiting) == 40
        assert all(not counts for _, counts in queue.given_back)


async def test_a_line_that_does_not_end_in_time_is_given_back(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    async def script(number: int) -> Answer:
        if number == 3:
            await asyncio.Event().wait()
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender, drain_s=0.1) as running:
        record = await running.batch(10)
        await until("one is left", lambda: sender.running == 1 and len(sender.sent) == 10)
        await running.stop()
        assert queue.given_back == [(3, False)]
        assert await queue.outstanding(record) == 1


async def test_a_defect_does_not_come_back_forever(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_AGAIN_S", 0.001)

    async def script(number: int) -> Answer:
        if number == 1:
            raise RuntimeError("a defect")
        return ok(number)

    sender.script = script
    async with working(storage, queue, sender) as running:
        record = await running.batch(3)
        await running.done(record)
        assert sender.sent.count(1) == 5
        assert sorted(one.ok for one in await running.results(record)) == [False, True, True]


async def test_a_result_that_can_never_be_kept_fails_its_line_alone(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that were to be written with it, and lines of others, go on."""
    monkeypatch.setattr(recorder_module, "_FIRST_PAUSE_S", 0.001)
    async with working(storage, queue, sender, concurrency=8) as running:
        add_segment = storage.batches.add_segment

        async def failing(record: BatchRecord, results: Sequence[Result]) -> str:
            if any(one.line == 3 and one.ok for one in results):
                raise ValueError("it has no name")
            return await add_segment(record, results)

        monkeypatch.setattr(running.batches, "add_segment", failing, raising=False)
        record = await running.batch(20)
        await running.done(record)
        kept = {one.line: one for one in await running.results(record)}
        assert [line for line, one in kept.items() if not one.ok] == [3]
        assert json.loads(kept[3].text)["error"]["code"] == "engine_failed"


async def test_a_batch_whose_results_can_never_be_kept_stops_no_other(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth attempt is not sent, because an attempt whose lease ran out counts."""
    monkeypatch.setattr(recorder_module, "_FIRST_PAUSE_S", 0.001)
    failures = metrics.STORE_FAILURES.labels("segment")._value
    before = failures.get()
    async with working(storage, queue, sender, concurrency=8) as running:
        add_segment = storage.batches.add_segment

        async def failing(record: BatchRecord, results: Sequence[Result]) -> str:
            if record.key_id == "bad":
                raise ValueError("it has no name")
            return await add_segment(record, results)

        monkeypatch.setattr(running.batches, "add_segment", failing, raising=False)
        bad = await running.batch(1, 1, key_id="bad")
        await until("it failed", lambda: failures.get() > before)
        record = await running.batch(100, 2)
        await running.done(record)
        await until("nothing is held", lambda: running.worker.held == 0)
        assert not running.worker._recorder.behind
        assert metrics.DEFECTS.labels("segment")._value.get() > 0
        assert await queue.outstanding(bad) == 1
        assert failures.get() >= before + 10
        sent = len(sender.sent)
        (line,) = queue.batches[bad.id].lines.values()
        line.attempts = 9
        queue.expire()
        await until("it is taken again", lambda: queue.fence > 101)
        await until("nothing is held", lambda: running.worker.held == 0)
        assert len(sender.sent) == sent


async def test_results_are_kept_in_any_epoch(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender
) -> None:
    """Each reset of Redis is an epoch, and their number never falls. This one is far from the first."""
    queue.fence = fence_base(2**20)
    async with working(storage, queue, sender) as running:
        record = await running.batch(3)
        await running.done(record)
        kept = await running.results(record)
        assert sorted(one.line for one in kept) == [0, 1, 2]
        assert all(one.fence > fence_base(2**20) for one in kept)


async def test_lines_whose_file_is_gone_get_error_lines(
    storage: Storage, queue: MemoryQueue, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_AGAIN_S", 0.001)
    async with working(storage, queue, sender) as running:
        record, validated, refs = await put_batch(storage, 3)
        await storage.files.delete(record.key_id, record.input_file)
        await storage.objects.delete([storage.files.data_path(record.key_id, record.input_file)])
        await queue.add(record, validated, refs)
        await running.done(record)
        assert sender.sent == []
        assert [one.ok for one in await running.results(record)] == [False] * 3
