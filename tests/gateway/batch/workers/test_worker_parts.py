"""A worker, with queue and logs in memory: what is written when, what is lost, and the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Answer
from fleetkeeper_gateway.batch.model import Attempt, Trouble
from fleetkeeper_gateway.batch.workers import attempt as attempt_module
from fleetkeeper_gateway.batch.workers import chunk_run as chunk_module
from fleetkeeper_gateway.batch.workers import holding as holding_module
from fleetkeeper_gateway.batch.workers import worker as worker_module
from tests.gateway.batch.workers.memory import MODEL, MemoryQueue, ScriptedSender, until
from tests.gateway.batch.workers.working import Gate, working
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- parts ------------------------------------------------------------------------------------------


async def test_a_result_is_written_after_30_seconds(sender: ScriptedSender) -> None:
    now = 1000.0
    gate = sender.script = Gate(lambda _key, _model, number: number == 9)
    async with working(sender, monotonic=lambda: now) as running:
        record = await running.batch(10)
        await until("one is left", lambda: running.worker.running == 1 and len(sender.sent) == 10)
        now += 29.0
        running.worker._changed.set()
        await asyncio.sleep(0.05)
        assert running.lines(record) == []
        now += 1.0
        running.worker._changed.set()
        await until("a part is written", lambda: len(running.lines(record)) == 9)
        gate.open.set()
        await running.done(record)
        assert [part.closing for part in running.batches.parts[record.id, 0]] == [False, True]


async def test_a_part_is_written_before_its_results_are_too_large(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "MAX_PART_BYTES", 2000)
    gate = sender.script = Gate(lambda _key, _model, number: number == 99)
    async with working(sender) as running:
        record = await running.batch(100)
        await until("parts are written", lambda: len(running.lines(record)) > 60)
        gate.open.set()
        await running.done(record)
        assert len(running.batches.parts[record.id, 0]) < 50


async def test_results_of_many_chunks_take_bounded_memory(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "RESULT_BYTES", 8000)
    gate = sender.script = Gate(lambda _key, _model, number: number % 10 == 9)
    async with working(sender, places=64) as running:
        records = [await running.batch(10, number) for number in range(10)]
        await until("what can be is done", lambda: sender.running.total() == 10)
        holding = running.worker._holding
        await until(
            "the largest are written", lambda: sum(run.bytes for run in holding.runs) <= 4000
        )
        gate.open.set()
        await running.done(*records)


async def test_while_the_store_fails_results_stay_and_no_lines_of_the_key_are_sent(
    sender: ScriptedSender,
) -> None:
    async with working(sender) as running:
        running.batches.failing.add("append")
        record = await running.batch(500, chunk=50)
        await until("writing failed often", lambda: running.batches.calls["append"] > 5)
        sent = len(sender.sent)
        tries = running.batches.calls["append"]
        await until("it is tried again", lambda: running.batches.calls["append"] > tries + 3)
        assert len(sender.sent) == sent < 500
        running.batches.failing.clear()
        await running.done(record)
        assert len(sender.sent) == 500, "nothing was computed twice"


async def test_a_log_that_ends_every_write_with_a_defect_stops_no_other(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(sender) as running:
        append = running.batches.call

        async def call(name: str) -> None:
            await append(name)
            if name == "append" and broken:
                raise ValueError("a defect")

        monkeypatch.setattr(running.batches, "call", call)
        broken = True
        bad = await running.batch(3, 1)
        defects = metrics.DEFECTS.labels("part")._value
        before = defects.get()
        await until("it failed", lambda: defects.get() > before)
        broken = False
        record = await running.batch(100, 2)
        await running.done(record)
        assert running.lines(bad) == []
        running.queue.expire()
        await running.done(bad)


@pytest.mark.parametrize("what", ["index", "read"])
async def test_a_chunk_that_cannot_be_read_waits_again(sender: ScriptedSender, what: str) -> None:
    async with working(sender) as running:
        running.batches.failing.add(what)
        record = await running.batch(3)
        await until("it was given back", lambda: bool(running.queue.given_back))
        running.batches.failing.clear()
        running.worker._holding._rests.clear()
        await running.done(record)


async def test_a_chunk_that_is_a_defect_stops_no_other(sender: ScriptedSender) -> None:
    async with working(sender) as running:
        running.batches.defects.add(f"batch_{1:032x}")
        await running.batch(3, 1)
        await running.done(await running.batch(3, 2))
        assert running.worker.held <= 1
        assert running.queue.given_back == []


async def test_while_redis_is_down_lines_that_are_held_go_on(sender: ScriptedSender) -> None:
    gate = sender.script = Gate()
    async with working(sender) as running:
        record = await running.batch(10)
        await until("all run", lambda: sender.running.total() == 10)
        running.queue.down = True
        gate.open.set()
        await running.done(record)
        await until("nothing is held", lambda: running.worker.held == 0)
        running.queue.down = False
        await running.done(await running.batch(3, 2))
        assert len(sender.sent) == 13


# -- what is lost, and ends -------------------------------------------------------------------------


async def test_what_a_process_writes_that_was_stopped_for_an_hour_counts_once(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunk was taken by another process, which wrote all lines."""
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    gate = Gate(lambda *_: sender.times(0) == 1)
    sender.script = gate
    duplicates = metrics.DUPLICATES._value
    before = duplicates.get()
    async with working(sender, processes=4) as running:
        record = await running.batch(5)
        await until("all run", lambda: sender.running.total() == 5)
        (first,) = [worker for worker in running.workers if worker.running]
        queue, asked = running.queues[running.workers.index(first)], asyncio.Event()

        async def stopped() -> dict[str, int]:
            asked.set()
            return {}

        monkeypatch.setattr(queue, "keys", stopped)
        await asked.wait()
        running.queue.expire()
        await running.done(record)
        assert first.running == 5, "its batch goes on, so its lines do"
        gate.open.set()
        await until("nothing is held", lambda: first.held == 0)
        assert [one.line for one in running.lines(record)] == list(range(5))
        assert duplicates.get() == before + 5


async def test_lines_of_a_batch_that_ended_end_after_a_time_and_what_there_is_is_written(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    gate = sender.script = Gate(lambda _key, _model, number: number >= 3)
    async with working(sender, places=8) as running:
        record = await running.batch(50)
        await until("it is full", lambda: sender.running.total() == 7)
        await running.queue.remove(record)
        await until("all ended", lambda: sender.running.total() == 0 and running.worker.held == 0)
        assert [one.line for one in running.lines(record)] == [0, 1, 2]
        assert len(sender.sent) == 10, "no other line was sent"
        gate.open.set()


async def test_lines_of_a_batch_that_redis_forgot_for_a_while_run_to_their_end(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader added it again, and another process took its chunk."""
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    gate = sender.script = Gate()
    async with working(sender) as running:
        record = await running.batch(5)
        await until("all run", lambda: sender.running.total() == 5)
        (run,) = running.worker._holding.runs
        known = running.queued.batches.pop(record.id)
        await until("it is missed", lambda: run.is_ending)
        known.held[0] = replace(known.held[0], entry="of another process")
        running.queued.batches[record.id] = known
        await until("its time is over", lambda: not (run.is_ending and run.running))
        assert sender.running.total() == 5
        gate.open.set()
        await running.done(record)
        assert len(sender.sent) == 5


async def test_a_chunk_that_is_taken_again_where_it_runs_is_not_begun_again(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    gate = sender.script = Gate()
    async with working(sender) as running:
        record = await running.batch(5)
        await until("all run", lambda: sender.running.total() == 5)
        (run,) = running.worker._holding.runs
        del running.queued.batches[record.id]
        await until("it is missed", lambda: run.is_ending)
        await MemoryQueue(running.queued).add(record, MODEL, [0])
        await until("it is taken", lambda: len(running.queue.taken) == 2)
        await until("it goes on", lambda: not run.is_ending)
        gate.open.set()
        await running.done(record)
        await until("nothing is held", lambda: running.worker.held == 0)
        assert running.queue.finished == running.queue.taken[1:]
        assert len(sender.sent) == 5


async def test_running_lines_are_counted_by_key_for_all_pods(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.01)
    gate = sender.script = Gate()
    async with working(sender) as running:
        for number, key in enumerate("ab"):
            await running.batch(5, number, key_id=key)
        await until("it is known", lambda: running.queued.running.get("p0") == {"a": 5, "b": 5})
        gate.open.set()
        await until("it is known", lambda: running.queued.running.get("p0") == {})


# -- the end ----------------------------------------------------------------------------------------


async def test_at_the_end_lines_that_run_are_finished_and_chunks_given_back(
    sender: ScriptedSender,
) -> None:
    gate = sender.script = Gate()
    async with working(sender, places=8) as running:
        record = await running.batch(50)
        await until("it is full", lambda: sender.running.total() == 7)
        running.worker.stop()
        await asyncio.sleep(0.02)
        gate.open.set()
        await running.tasks[0]
        assert [one.line for one in running.lines(record)] == list(range(7))
        assert Counter(running.queue.given_back) == Counter(running.queue.taken)
        assert running.worker.held == 0


async def test_a_line_that_does_not_end_in_time_has_no_result(sender: ScriptedSender) -> None:
    gate = sender.script = Gate(lambda _key, _model, number: number == 3)
    async with working(sender, drain_s=0.05) as running:
        record = await running.batch(10)
        await until("one is left", lambda: running.worker.running == 1 and len(sender.sent) == 10)
        await running.stop()
        assert [one.line for one in running.lines(record)] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert len(running.queue.given_back) == 1
        gate.open.set()


async def test_attempts_are_noted_when_a_chunk_is_given_back(sender: ScriptedSender) -> None:
    async def script(_key: str, _model: str, _number: int) -> Answer:
        return Answer(500, b"", "r")

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(1)
        await until("it pauses", lambda: len(sender.sent) == 1 and running.worker.running == 0)
        await running.stop()
        (part,) = running.batches.parts[record.id, 0]
        assert part.attempts == [Attempt(0, Trouble.FAILED)]


async def test_lines_that_wait_for_memory_are_not_sent_at_the_end(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "BODY_BYTES", 2000)
    gate = sender.script = Gate()
    async with working(sender) as running:
        record = await running.batch(10, padding="x" * 500)
        await until("one is sent", lambda: bool(sender.sent))
        await until("others wait", lambda: running.worker.running == 10)
        running.worker.stop()
        await asyncio.sleep(0.02)
        gate.open.set()
        await running.tasks[0]
        assert len(sender.sent) == len(running.lines(record)) < 5


async def test_at_the_end_a_store_that_fails_takes_bounded_time(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_WRITE_S", 0.05)
    async with working(sender) as running:
        running.batches.failing.add("append")
        await running.batch(10)
        await until("writing failed", lambda: running.batches.calls["append"] > 1)
        await running.stop()
        assert len(running.queue.given_back) == 1


async def test_a_part_that_cannot_be_written_keeps_no_process_busy(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "RESULT_BYTES", 4000)
    gate = Gate(lambda key, _model, _number: key == "hangs")
    sender.script = gate
    async with working(sender) as running:
        idle = await running.batch(3, 1, key_id="hangs")
        await until("lines run", lambda: sender.running.total() == 3)
        running.batches.failing.add("append")
        full = await running.batch(20, 2, key_id="writes")
        runs = running.worker._holding
        await until("a write fails", lambda: any(run.is_failing for run in runs._loaded))
        (hanging,) = [run for run in runs._loaded if run.key == "hangs"]
        assert sum(run.bytes for run in runs._loaded) > 2000
        runs.tend(running.worker._monotonic())
        assert not hanging.is_writing, "it has nothing to write"
        running.batches.failing.clear()
        gate.open.set()
        await running.done(idle, full)


async def test_large_answers_wait_while_results_cannot_be_written(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "RESULT_BYTES", 1000)
    async with working(sender) as running:
        await until("answers may be read", running.may_read.is_set)
        running.batches.failing.add("append")
        record = await running.batch(20)
        await until("there is no room", lambda: not running.may_read.is_set())
        running.batches.failing.clear()
        await running.done(record)
        await until("answers may be read again", running.may_read.is_set)


async def test_while_a_process_ends_what_is_answered_is_written(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed before its last line ends."""
    monkeypatch.setattr(worker_module, "_WAIT_S", 0.01)
    now = 1000.0
    gate = sender.script = Gate(lambda _key, _model, number: number == 9)
    async with working(sender, monotonic=lambda: now) as running:
        record = await running.batch(10)
        await until("one is left", lambda: running.worker.running == 1 and len(sender.sent) == 10)
        running.worker.stop()
        now += 30.0
        await until("a part is written", lambda: len(running.lines(record)) == 9)
        gate.open.set()
        await running.done(record)


async def test_a_chunk_that_cannot_be_loaded_keeps_no_process_from_its_end(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_TAKING_S", 0.01)
    never, reads = asyncio.Event(), asyncio.Event()

    async def call(name: str) -> None:
        if name == "index":
            reads.set()
            await never.wait()

    async with working(sender) as running:
        monkeypatch.setattr(running.batches, "call", call)
        record = await running.batch(1)
        await asyncio.wait_for(reads.wait(), GUARD_S)
        await running.stop()
        assert running.worker.held == 0
        assert running.batches.open_chunks(record)
