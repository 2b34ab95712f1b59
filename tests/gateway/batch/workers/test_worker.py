"""A worker, with queue and logs in memory: results and attempts."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import Answer, AnswerTooLarge, NotAnswered
from fleetkeeper_gateway.batch.model import (
    MAX_ATTEMPTS,
    Attempt,
    BatchRecord,
    Counts,
    Final,
    Result,
    Status,
    Trouble,
)
from fleetkeeper_gateway.batch.workers import attempt as attempt_module
from fleetkeeper_gateway.batch.workers import chunk_run as chunk_module
from fleetkeeper_gateway.batch.workers import lines as lines_module
from tests.gateway.batch.workers.memory import (
    KEY,
    MODEL,
    MemoryQueue,
    Part,
    ScriptedSender,
    batch_record,
    ok,
    until,
)
from tests.gateway.batch.workers.working import working

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- the promise ------------------------------------------------------------------------------------


async def test_every_line_gets_one_result_and_every_chunk_one_part(sender: ScriptedSender) -> None:
    async with working(sender) as running:
        record = await running.batch(300, chunk=100)
        await running.done(record)
        results = running.lines(record)
        assert [one.line for one in results] == list(range(300))
        assert all(one.ok for one in results)
        line = json.loads(results[7].text)
        assert (line["custom_id"], line["response"]["body"]["number"]) == ("c-7", 7)
        assert running.batches.calls["append"] == 3
        await until("nothing is held", lambda: running.worker.held == 0)
        assert {one.chunk for one in running.queue.finished} == {0, 1, 2}
        assert running.worker.running == 0
        assert running.workers[0]._places.running == 0


async def test_a_chunk_that_another_process_began_is_continued(sender: ScriptedSender) -> None:
    async with working(sender) as running:
        done = [Result(number, ok=True, text=b"{}") for number in (0, 2)]
        key = (f"batch_{0:032x}", 0)
        running.batches.parts[key] = [Part(done, [], closing=False)]
        record = await running.batch(4)
        await running.done(record)
        assert sorted(number for _, number in sender.sent) == [1, 3]
        assert [one.line for one in running.lines(record)] == [0, 1, 2, 3]


async def test_an_old_queue_changes_nothing(sender: ScriptedSender) -> None:
    """A chunk whose log is closed, or whose batch is gone, is only forgotten."""
    async with working(sender) as running:
        record = await running.batch(4)
        await running.done(record)
        await until("nothing is held", lambda: running.worker.held == 0)
        await MemoryQueue(running.queued).add(record, "m", [0])
        await until("it is forgotten", lambda: len(running.queue.finished) == 2)
        assert len(sender.sent) == 4
        del running.batches.indexes[record.id]
        gone = await running.batch(1, 7)
        del running.batches.indexes[gone.id]
        await until("it was taken", lambda: running.queue.taken[-1].batch == gone)
        await until("nothing is held", lambda: running.worker.held == 0)
        assert running.queue.given_back == []


async def test_what_an_old_queue_has_of_a_batch_that_ended_is_removed(
    sender: ScriptedSender,
) -> None:
    async with working(sender) as running:
        ended, damaged = batch_record(1), batch_record(2)
        running.batches.finals[ended.id] = Final(Status.COMPLETED, 1, Counts())
        for record in (damaged, ended):
            await MemoryQueue(running.queued).add(record, "m", [0])
        await until("they are dropped", lambda: running.batches.calls["final"] == 2)
        await until("it is removed", lambda: ended.id not in running.queued.batches)
        assert running.queued.batches.keys() == {damaged.id}


# -- attempts ---------------------------------------------------------------------------------------


async def test_an_answer_that_would_be_the_same_again_is_a_result(sender: ScriptedSender) -> None:
    async def script(_key: str, _model: str, number: int) -> Answer:
        if number == 2:
            raise AnswerTooLarge(100)
        return Answer(404, b'{"error": {"code": "model_not_found"}}', "r")

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(3)
        await running.done(record)
        results = running.lines(record)
        assert [one.ok for one in results] == [False] * 3
        assert json.loads(results[0].text)["response"]["status_code"] == 404
        found = json.loads(results[2].text)
        assert (found["custom_id"], found["error"]["code"]) == ("c-2", "answer_too_large")
        assert len(sender.sent) == 3


async def test_an_answer_that_is_too_large_once_it_is_written_is_no_result(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "_MAX_RESULT", 1000)

    async def script(_key: str, _model: str, _number: int) -> Answer:
        return Answer(200, json.dumps("\u2028" * 200, ensure_ascii=False).encode(), "r")

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(1)
        await running.done(record)
        assert json.loads(running.lines(record)[0].text)["error"]["code"] == "answer_too_large"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Answer(500, b"", "r"), "status 500"),
        (Answer(200, b'{"a": NaN}', "r"), "status 200, and no JSON"),
        (NotAnswered("the connection broke", sent=True), "the connection broke"),
        (RuntimeError("a defect"), "the line could not be processed"),
    ],
)
async def test_five_attempts_make_an_error_line_with_its_id(
    sender: ScriptedSender,
    ending: Answer | Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_module, "AGAIN_S", 0.001)

    async def script(_key: str, _model: str, number: int) -> Answer:
        if number != 1:
            return ok(number)
        if isinstance(ending, Answer):
            return ending
        raise ending

    sender.script = script
    with capture_logs() as logs:
        async with working(sender) as running:
            record = await running.batch(3)
            await running.done(record)
        reasons = {one["reason"] for one in logs if one["event"] == "attempt failed"}
        assert reasons == {reason}
        assert sender.times(1) == 5
        (failed,) = [one for one in running.lines(record) if not one.ok]
        found = json.loads(failed.text)
        assert (found["custom_id"], found["error"]["code"]) == ("c-1", "engine_failed")
        attempts = [one for part in running.batches.parts[record.id, 0] for one in part.attempts]
        assert attempts == [Attempt(1, Trouble.FAILED)] * 4, "the fifth is the result"


async def test_a_lack_of_memory_is_no_attempt(sender: ScriptedSender) -> None:
    """The memory of a process is that of all its lines."""

    async def script(_key: str, _model: str, number: int) -> Answer:
        if sender.times(number) <= 5:
            raise MemoryError
        return ok(number)

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(1)
        await running.done(record)
        assert [one.ok for one in running.lines(record)] == [True]


async def test_a_line_that_failed_waits_longer_each_time_and_goes_after_the_others(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that answers 500 until it is replaced must not use up five attempts in seconds."""
    monkeypatch.setattr(chunk_module, "AGAIN_S", 0.1)
    sent: list[float] = []

    async def script(_key: str, _model: str, number: int) -> Answer:
        if number != 0:
            return ok(number)
        sent.append(time.monotonic())
        return Answer(500, b"", "r") if len(sent) < 4 else ok(number)

    sender.script = script
    async with working(sender, places=1) as running:
        record = await running.batch(3)
        await running.done(record)
        assert [number for _, number in sender.sent[:4]] == [0, 1, 2, 0]
        pauses = [after - before for before, after in itertools.pairwise(sent)]
        assert all(found >= least for found, least in zip(pauses, (0.1, 0.4, 1.6), strict=True))


@pytest.mark.parametrize(
    "refusal",
    [
        Answer(429, b"{}", "r", 0.01),
        Answer(503, b"{}", "r", 0.01),
        NotAnswered("cannot connect", sent=False),
    ],
)
async def test_a_refusal_is_no_attempt(
    sender: ScriptedSender, refusal: Answer | NotAnswered
) -> None:
    seen: Counter[int] = Counter()

    async def script(_key: str, _model: str, number: int) -> Answer:
        seen[number] += 1
        if number == 0 and seen[number] <= 3:
            if isinstance(refusal, Answer):
                return refusal
            raise refusal
        return ok(number)

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(2)
        await running.done(record)
        assert sender.times(0) == 4
        assert all(one.ok for one in running.lines(record))
        (part,) = running.batches.parts[record.id, 0]
        assert part.attempts == []


async def test_a_service_that_sleeps_costs_no_attempt_and_is_woken_by_the_line_that_may(
    sender: ScriptedSender,
) -> None:
    now, header = 0.0, None
    record: BatchRecord | None = None

    async def script(_key: str, _model: str, number: int) -> Answer:
        if sender.wakes[-1] is None:
            return Answer(503, b"{}", "r", 4.0, refused="service_asleep")
        return ok(number)

    sender.script = script
    async with working(
        sender,
        places=64,
        monotonic=lambda: now,
        wake=lambda batch, model: header if (batch, model) == (record, MODEL) else None,
    ) as running:
        record = await running.batch(100)
        await until("it was refused", lambda: len(sender.sent) == 32 and not running.worker.running)
        for turn in range(1, MAX_ATTEMPTS + 2):
            now += 4.0
            running.worker._changed.set()
            await until("one was sent", lambda: len(sender.sent) >= 32 + turn)  # noqa: B023
            await until("nothing runs", lambda: running.worker.running == 0)
        assert sender.sent[32:] == [(KEY, 0)] * (MAX_ATTEMPTS + 1)
        header, now = "deadline", now + 4.0
        running.worker._changed.set()
        await running.done(record)
        assert all(one.ok for one in running.lines(record))
        (part,) = running.batches.parts[record.id, 0]
        assert part.attempts == []


@pytest.mark.parametrize(
    ("attempts", "sent"),
    [
        ([Trouble.FAILED] * 5, 0),
        ([Trouble.FAILED] * 4, 1),
        ([Trouble.KILLED] * 2, 0),
        ([Trouble.KILLED, *[Trouble.FAILED] * 4], 1),
    ],
)
async def test_attempts_in_the_log_count(
    sender: ScriptedSender, attempts: list[Trouble], sent: int
) -> None:
    async def script(_key: str, _model: str, number: int) -> Answer:
        return ok(number) if number else Answer(500, b"", "r")

    sender.script = script
    async with working(sender) as running:
        noted = [Attempt(0, trouble) for trouble in attempts]
        running.batches.parts[f"batch_{0:032x}", 0] = [Part([], noted, closing=False)]
        record = await running.batch(3)
        await running.done(record)
        assert sender.times(0) == sent
        found = json.loads(running.lines(record)[0].text)
        assert (found["custom_id"], found["error"]["code"]) == ("c-0", "engine_failed")
        assert [one.ok for one in running.lines(record)] == [False, True, True]


async def test_a_line_that_ended_a_process_takes_no_result_with_it(sender: ScriptedSender) -> None:
    """It goes last and alone, once all others are written. Meanwhile the parent knows its number."""
    seen: list[tuple[list[int], object]] = []

    async with working(sender) as running:

        async def script(_key: str, _model: str, number: int) -> Answer:
            if number == 1:
                lines = [one.line for part in parts for one in part.results]
                seen.append((lines, running.handling[0].read()))
            return ok(number)

        sender.script = script
        noted = [Attempt(1, Trouble.KILLED)]
        parts = running.batches.parts[f"batch_{0:032x}", 0] = [Part([], noted, closing=False)]
        record = await running.batch(4)
        await running.done(record)
        assert seen == [([0, 2, 3], None)]


async def test_the_line_is_named_while_its_answer_is_handled(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[object] = []

    async with working(sender) as running:

        def judge(answer: Answer) -> object:
            named.append(running.handling[0].read())
            return real(answer)

        real = lines_module.judge
        monkeypatch.setattr(attempt_module, "judge", judge)
        record = await running.batch(3)
        await running.done(record)
        assert sorted(map(str, named)) == [str((record.id, number)) for number in range(3)]
        assert running.handling[0].read() is None


async def test_lines_whose_file_is_gone_get_error_lines(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "AGAIN_S", 0.001)
    async with working(sender) as running:
        running.objects.data = {}
        record = await running.batch(3)
        running.objects.data.clear()
        await running.done(record)
        assert sender.sent == []
        assert [one.ok for one in running.lines(record)] == [False] * 3
