"""A worker, with queue and logs in memory: what keys and services do to one another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from fleetkeeper_gateway.batch.interfaces import Answer, flow_of
from fleetkeeper_gateway.batch.workers import attempt as attempt_module
from fleetkeeper_gateway.batch.workers import taker as taker_module
from tests.gateway.batch.workers.memory import (
    KEY,
    MODEL,
    ScriptedSender,
    ok,
    until,
)
from tests.gateway.batch.workers.working import Gate, working

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- rest -------------------------------------------------------------------------------------------

LIMITED = Answer(429, b"{}", "r", 60.0, refused="rate_limit_exceeded")


async def test_a_key_at_its_limit_does_not_stop_the_others(sender: ScriptedSender) -> None:
    async def script(key: str, _model: str, number: int) -> Answer:
        return LIMITED if key == "limited" else ok(number)

    sender.script = script
    async with working(sender) as running:
        slow = await running.batch(50, 1, key_id="limited")
        record = await running.batch(50, 2)
        await running.done(record)
        assert running.lines(slow) == []
        await until("its chunk waits again", lambda: running.worker.held == 0)
        assert [one.batch for one in running.queue.given_back] == [slow]
        paces = running.worker.paces.all().values()
        assert {pace.limit for pace in paces} == {32.0}, "the service refused nothing"


@pytest.mark.parametrize(
    ("bad", "status", "route"),
    [
        (("suspended", MODEL), 503, flow_of),
        (("suspended", MODEL), 503, lambda key, _model: f"service of {key}"),
        ((KEY, "other"), 401, flow_of),
        ((KEY, "other"), 429, flow_of),
    ],
)
async def test_a_service_that_refuses_slows_down_no_other_of_its_key_or_model_name(
    sender: ScriptedSender, bad: tuple[str, str], status: int, route: Callable[[str, str], str]
) -> None:
    """Two tenants may give their models one name. A service that answers as the gateway does rests no key."""

    async def script(key: str, model: str, number: int) -> Answer:
        if (key, model) != bad:
            return ok(number)
        return Answer(status, b'{"error": {"code": "rate_limit_exceeded"}}', "r", 300.0)

    sender.script = script
    async with working(sender, route=route) as running:
        slow = await running.batch(500, 1, key_id=bad[0], model=bad[1])
        await until("it was refused", lambda: bool(sender.sent))
        record = await running.batch(500, 2)
        await running.done(record)
        assert running.lines(slow) == []
        assert len(sender.sent) <= 500 + 33, "a route that rests is not asked for lines"
        assert sorted(pace.limit < 32.0 for pace in running.worker.paces.all().values()) == [
            False,
            True,
        ]
        await until("its chunks wait again", lambda: running.worker.held == 0)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(429, b"{}", "r", 1e8, refused="rate_limit_exceeded"),
        Answer(401, b"{}", "r", refused="invalid_api_key"),
    ],
)
async def test_a_key_rests_for_a_bounded_time_and_no_line_is_lost(
    sender: ScriptedSender, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is wrong or a Secret that is not mounted yet says nothing about the line."""
    monkeypatch.setattr(attempt_module, "MAX_REST_S", 0.05)
    monkeypatch.setattr(attempt_module, "UNKNOWN_REST_S", 0.05)
    refused = [answer] * 20

    async def script(_key: str, _model: str, number: int) -> Answer:
        return refused.pop() if refused else ok(number)

    sender.script = script
    async with working(sender) as running:
        record = await running.batch(3)
        await running.done(record)
        assert all(one.ok for one in running.lines(record))
    assert refused == []


async def test_lines_that_cannot_be_read_are_not_tried_without_a_pause(
    sender: ScriptedSender,
) -> None:
    async with working(sender) as running:
        running.objects.failing = True
        record = await running.batch(4)
        await until("it was tried", lambda: bool(running.objects.reads))
        await running.batch(4, 2, key_id="other")
        await until("all rest", lambda: len(running.worker._holding._rests) == 2)
        assert len(running.objects.reads) <= 2, "its block was read once for all lines"
        running.objects.failing = False
        running.worker._holding._rests.clear()
        await running.done(record)


# -- shares -----------------------------------------------------------------------------------------


async def test_as_many_lines_run_at_the_end_of_a_chunk_although_its_last_line_is_slow(
    sender: ScriptedSender,
) -> None:
    """The slow line keeps one place. The others go to the next chunks, also of other batches."""
    gate = Gate(lambda _key, _model, number: number == 3)

    async def script(key: str, model: str, number: int) -> Answer:
        await asyncio.sleep(0.05 + number % 7 / 100)
        return await gate(key, model, number)

    sender.script = script
    async with working(sender, places=16) as running:
        records = [await running.batch(40, number, chunk=20) for number in range(6)]
        await until("it is full", lambda: sender.running.total() == 14)
        seen = []
        while len(sender.sent) < 240:
            seen.append(sender.running.total())
            await asyncio.sleep(0.005)
        await until("each batch has one slow line", lambda: sender.running.total() == 6)
        assert sum(seen) / len(seen) >= 13, seen
        gate.open.set()
        await running.done(*records)


async def test_two_keys_share_the_places(sender: ScriptedSender) -> None:
    gate = sender.script = Gate()
    async with working(sender, processes=2, places=64) as running:
        first = await running.batch(200, 1, key_id="a")
        await until("one has what it may have", lambda: sender.running["a"] == 32)
        second = await running.batch(200, 2, key_id="b")
        await until("the other has its part", lambda: sender.running["b"] == 32 - 8)
        gate.open.set()
        await running.done(first, second)
        assert sender.most["a"] <= 56


async def test_a_flood_in_every_place_leaves_an_eighth(sender: ScriptedSender) -> None:
    """Lines of an hour are in all places that one key may have. Another key's batch still ends."""
    gate = Gate(lambda key, _model, _number: key == "a")

    async def script(key: str, model: str, number: int) -> Answer:
        await asyncio.sleep(0.01)
        return await gate(key, model, number)

    sender.script = script
    async with working(sender, processes=4, places=64) as running:
        for number in range(8):
            await running.batch(64, number, key_id="a", model=f"m-{number}")
        await until("it has all that it may have", lambda: sender.running["a"] == 56)
        second = await running.batch(200, 9, key_id="b")
        await running.done(second)
        assert 1 < sender.most["b"] <= 8
        assert sender.running["a"] == 56
        gate.open.set()


async def test_a_key_with_many_models_has_no_more_than_its_part(sender: ScriptedSender) -> None:
    """Each model has a pace of its own, but the places are the key's."""
    gate = sender.script = Gate(lambda key, _model, _number: key == "a")
    async with working(sender, places=64) as running:
        for number in range(250):
            await running.batch(2, number, key_id="a", model=f"m-{number}")
        await until("it has all that it may have", lambda: sender.running["a"] == 56)
        assert sum(one.batch.key_id == "a" for one in running.queue.taken) < 250
        record = await running.batch(100, 300, key_id="b")
        await running.done(record)
        gate.open.set()


async def test_a_service_that_answers_nothing_gets_no_new_lines(sender: ScriptedSender) -> None:
    now = 1000.0
    gate = sender.script = Gate(lambda _key, model, _number: model == "hung")
    async with working(sender, places=64, monotonic=lambda: now) as running:
        hung = await running.batch(100, 1, model="hung")
        await until("it has lines", lambda: sender.running.total() >= 32)
        before = len(sender.sent)
        now += 301.0
        other = await running.batch(20, 2)
        await running.done(other)
        assert len(sender.sent) == before + 20
        gate.open.set()
        await running.done(hung)


async def test_lines_of_16_mib_take_bounded_memory_and_others_find_room(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled by 100: bodies of 160 KiB, and room for four of them."""
    monkeypatch.setattr(attempt_module, "BODY_BYTES", 700_000)
    gate = sender.script = Gate(lambda key, _model, _number: key == "a")
    async with working(sender, places=64) as running:
        large = await running.batch(20, 1, key_id="a", padding="x" * 160_000)
        await until("it has its part", lambda: sender.running["a"] == 2)
        small = await running.batch(50, 2, key_id="b")
        await running.done(small)
        assert sender.running["a"] == 2
        gate.open.set()
        await running.done(large)
        assert sender.most_bytes <= 700_000


async def test_a_batch_of_five_minutes_overtakes_one_of_fourteen_days(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the lines that wait in this process would take longer than its window."""
    monkeypatch.setattr(taker_module, "_OVERTAKE_S", 0.01)

    async def script(_key: str, _model: str, number: int) -> Answer:
        await asyncio.sleep(0.02)
        return ok(number)

    sender.script = script
    async with working(sender, places=2) as running:
        now = int(time.time())
        slow = await running.batch(256, 1, expires=now + 14 * 86_400)
        await until("it runs", lambda: sender.running.total() == 2)
        late = await running.batch(5, 2, expires=now + 15 * 86_400)
        urgent = await running.batch(5, 3, expires=now + 300)
        await running.done(urgent)
        assert len(sender.sent) < 200
        assert running.batches.open_chunks(slow) == running.batches.open_chunks(late) == [0]
        assert [one.batch.id for one in running.queue.taken] == [slow.id, urgent.id]


# -- many keys at once ------------------------------------------------------------------------------


async def test_keys_whose_pause_ends_at_once_take_no_more_than_all_places(
    sender: ScriptedSender,
) -> None:
    gate, refused, most = Gate(), True, 0

    async def script(key: str, model: str, number: int) -> Answer:
        nonlocal most
        if refused:
            return Answer(429, b"{}", "r", 4.0, refused="rate_limit_exceeded")
        most = max(most, sender.running.total())
        return await gate(key, model, number)

    sender.script = script
    now = 1000.0
    async with working(sender, places=64, monotonic=lambda: now) as running:
        for number in range(10):
            await running.batch(100, number, key_id=f"k{number}")
        await until("every key rests", lambda: len(running.worker._holding._rests) == 10)
        await until("nothing runs", lambda: running.worker.running == 0)
        refused, now = False, now + 5.0
        running.worker._changed.set()
        await until("all places are taken", lambda: sender.running.total() >= 64 - 64 // 8)
        await asyncio.sleep(0)
        assert most <= 64
        gate.open.set()


async def test_more_keys_than_a_process_has_rows_for_end_no_process(
    sender: ScriptedSender,
) -> None:
    """Keys that wait for their service hold no row. When they may go on, there are too few."""
    gate, asked = Gate(), set[str]()

    async def script(key: str, model: str, number: int) -> Answer:
        if key == "x0" and key not in asked:
            asked.add(key)
            return Answer(429, b"{}", "r", 3.0)
        return await gate(key, model, number)

    sender.script = script
    later = 0.0
    route = {"f": "service A", "x": "service B"}
    async with working(
        sender,
        places=1024,
        route=lambda key, _model: route[key[0]],
        monotonic=lambda: time.monotonic() + later,
    ) as running:
        full = [await running.batch(1, number, key_id=f"f{number}") for number in range(62)]
        await until("62 keys run", lambda: sender.running.total() == 62)
        rest = [await running.batch(1, 1000, key_id="x0")]
        await until("its service refused one", lambda: asked == {"x0"})
        rest += [
            await running.batch(1, 1000 + number, key_id=f"x{number}") for number in range(1, 5)
        ]
        await until("all chunks are held", lambda: len(running.worker._holding._loaded) == 67)
        later = 5.0
        running.worker._changed.set()
        await until("the others began", lambda: sender.running.total() > 62)
        gate.open.set()
        await running.done(*full, *rest)
