"""The parts of the batch benchmark that decide its figures, and the modes that it compares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper_contract.histogram_buckets import QUEUE_WAIT_EDGES_S
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample, run_open_loop
from fleetkeeper_local.load.schedule import Arrival
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.exhaustive

Part = Callable[[str], ModuleType]


def line(number: int, tokens: int = 10, at_s: float = 0.0) -> Arrival:
    return Arrival(number, at_s, "lines", "batch", "s", 4, tokens)


def answered(ended_s: float, cause: str = "") -> Sample:
    outcome = Outcome(not cause, cause, 0, 1, 0.0, None, ended_s, 10)
    return Sample(line(0), outcome, 0.0, 0.0, ended_s)


def test_tokens_a_second_end_with_the_last_line(part: Part) -> None:
    samples = [answered(end) for end in (1.0, 2.0, 5.0)]
    cell = part("window_figures").cell_of([line(0), line(1), line(2, tokens=30)], samples)
    assert (cell.tokens_per_s, cell.p50_s, cell.p99_s, cell.failed) == (10.0, 2.0, 5.0, 0)


def test_a_line_that_failed_is_told(part: Part) -> None:
    samples = [answered(1.0), answered(2.0, "http_500")]
    cell = part("window_figures").cell_of([line(0), line(1)], samples)
    assert (cell.failed, cell.p99_s) == (1, 1.0)


def test_the_p99_is_that_of_what_was_counted_in_between(part: Part) -> None:
    p99 = part("window_figures").bucket_p99_s
    empty = [0] * (len(QUEUE_WAIT_EDGES_S) + 1)
    before = [*empty]
    before[-1] = 1000  # long waits of an earlier measurement
    after = [*before]
    after[0] += 99
    after[3] += 1
    assert p99(before, after) == pytest.approx(QUEUE_WAIT_EDGES_S[0])
    after[0], after[3] = before[0], before[3] + 100
    lower, upper = QUEUE_WAIT_EDGES_S[2:4]
    assert p99(before, after) == pytest.approx(lower + 0.99 * (upper - lower))
    after[-1] += 1000
    assert p99(before, after) == QUEUE_WAIT_EDGES_S[-1]
    with pytest.raises(ValueError, match="no realtime request"):
        p99(before, before)


def found(part: Part, **changes: Any) -> Any:
    figures, modes = part("window_figures"), part("window_modes")
    offline = {name: figures.Cell(100.0, 1.0, 2.0, 0) for name in modes.MODES}
    offline |= {modes.window(8): figures.Cell(25.0, 4.0, 8.0, 0)}
    arriving = {name: offline[name] for name in offline if name != modes.UNLIMITED}
    alone = figures.Realtime(0.010, 0.100, 0.001, 0.005, 0.020, 0.030, 0)
    realtime = {figures.ALONE: alone, figures.AGAIN: alone, figures.BESIDE: alone}
    usual = {
        "offline": [offline],
        "arriving": [arriving],
        "realtime": [realtime],
        "lines": 64,
        "rate_per_s": [7.0],
    }
    return figures.Found(**{**usual, **changes})


def test_the_page_has_each_mode_and_ratios_of_one_block(part: Part) -> None:
    text = part("window_figures").page(found(part))
    assert "| windows of 8 | 25 (25 to 25) | 0.25 (0.25 to 0.25) |" in text
    assert text.count("| windows of 64 |") == 2
    assert text.count(", met") == 3
    assert "0 requests failed." in text


def test_the_process_has_a_page_of_its_own_with_what_was_before(part: Part) -> None:
    figures, modes = part("window_figures"), part("window_modes")
    cell = figures.Cell(100.0, 1.0, 2.0, 0)
    short = {modes.UNLIMITED: cell, figures.PROCESS: figures.Cell(90.0, 1.0, 2.0, 1)}
    long = {modes.UNLIMITED: cell, figures.PROCESS: figures.Cell(89.0, 1.0, 2.0, 1)}
    text = figures.process_page(found(part, offline=[short], long=[long], arriving=[], lines=256))
    assert "256 lines" in text
    assert text.count("the batch process has at least 0.9 times") == 2
    assert f"0.90 (0.90 to 0.90), met. Before: {figures.BEFORE_SHORT}." in text
    assert f"0.89 (0.89 to 0.89), **missed**. Before: {figures.BEFORE_LONG}." in text
    assert "2 requests failed." in text


def test_missed_goals_are_told(part: Part) -> None:
    figures, modes = part("window_figures"), part("window_modes")
    slow = dict(found(part).offline[0])
    slow[modes.TIER] = figures.Cell(84.0, 1.0, 2.0, 3)
    alone = figures.Realtime(0.010, 0.100, 0.001, 0.005, 0.020, 0.030, 0)
    beside = figures.Realtime(0.010, 0.100, 0.001, 0.027, 0.051, 0.080, 0)
    realtime = {figures.ALONE: alone, figures.AGAIN: alone, figures.BESIDE: beside}
    text = figures.page(found(part, offline=[slow], realtime=[realtime]))
    assert text.count("**missed**") == 3
    assert "above 1.1 times: 22 ms" in text
    assert "3 requests failed." in text
    # With the process itself, the goal is about it.
    text = figures.page(found(part, offline=[slow | {figures.PROCESS: slow[modes.UNLIMITED]}]))
    assert "the batch process has at least 0.9 times" in text
    assert "**missed**" not in text


class Engine:
    """An endpoint that answers when a test lets it, and says how many wait."""

    def __init__(self) -> None:
        self.open = 0
        self.most = 0
        self.tiers: set[str] = set()
        self.proceed = asyncio.Event()
        self.changed = asyncio.Condition()

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tiers.add(request.headers["X-Inference-Tier"])
        await self._count(+1)
        await self.proceed.wait()
        await self._count(-1)
        usage = {"completion_tokens": body["max_tokens"]}
        return web.json_response({"choices": [{}], "usage": usage})

    async def until_open(self, count: int) -> None:
        async with self.changed, asyncio.timeout(GUARD_S):
            await self.changed.wait_for(lambda: self.open == count)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.open += change
            self.most = max(self.most, self.open)
            self.changed.notify_all()


async def served(engine: Engine) -> tuple[web.AppRunner, str]:
    application = web.Application()
    application.router.add_post("/v1/completions", engine.complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}"


async def test_a_window_waits_for_all_and_the_tier_for_none(part: Part) -> None:
    modes, engine = part("window_modes"), Engine()
    runner, url = await served(engine)
    lines = [line(number) for number in range(20)]
    try:
        async with modes.patient_client(url, "m") as client:
            for name, expected in ((modes.window(8), 8), (modes.TIER, 20), (modes.UNLIMITED, 20)):
                engine.proceed.clear()
                engine.most = 0
                task = asyncio.create_task(modes.MODES[name][1](client, lines))
                await engine.until_open(expected)
                engine.proceed.set()
                samples = await task
                assert [sample.outcome.cause for sample in samples] == [""] * 20
                assert engine.most == expected
    finally:
        await runner.cleanup()


async def test_a_full_queue_is_kept_full_and_leaves_nothing(part: Part) -> None:
    modes, engine = part("window_modes"), Engine()
    runner, url = await served(engine)
    try:
        async with modes.patient_client(url, "m") as client:
            async with modes.full_queue(client, [line(0), line(1)]) as queue:
                await engine.until_open(modes.LINES_AT_A_TIME)
                assert queue.answered == 0
            assert queue.failed == 0
    finally:
        await runner.cleanup()
    assert engine.tiers == {"batch"}


def test_the_file_of_the_process_has_the_requests_of_the_other_modes(
    part: Part, tmp_path: Path
) -> None:
    process = part("real_process")
    process.write_lines(tmp_path / "lines.jsonl", "tiny", [line(3, tokens=7)])
    (written,) = (tmp_path / "lines.jsonl").read_text().splitlines()
    request = json.loads(written)
    assert (request["custom_id"], request["url"]) == ("3", "/v1/completions")
    assert request["body"]["max_tokens"] == 7
    assert len(request["body"]["prompt"]) == 4


class Answering:
    """A client whose requests are answered when the test says so."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answers: dict[int, asyncio.Event] = {}
        self.arrived = asyncio.Event()

    async def send(self, arrival: Arrival) -> Outcome:
        """Waits for the test."""
        self.sent.append(arrival.number)
        answer = self.answers[arrival.number] = asyncio.Event()
        self.arrived.set()
        await answer.wait()
        return Outcome(True, "", 200, 1, 0.0, None, 0.0, arrival.output_tokens)

    async def until_sent(self, count: int) -> None:
        """Returns when so many were sent."""
        while len(self.sent) < count:
            self.arrived.clear()
            await self.arrived.wait()


async def test_a_window_waits_for_the_whole_one_before(part: Part) -> None:
    """The last response of a window releases all its responses, and only then the next window."""
    client = Answering()
    windows = part("window_modes").Windows(client.send, 3, 0.01)
    sending = asyncio.create_task(windows.run())
    running = asyncio.create_task(run_open_loop(windows.send, [line(n) for n in range(5)]))
    async with asyncio.timeout(GUARD_S):
        await client.until_sent(3)
        client.answers[0].set()
        client.answers[1].set()
        await asyncio.sleep(0)
        assert client.sent == [0, 1, 2]
        client.answers[2].set()
        await client.until_sent(5)
        client.answers[3].set()
        client.answers[4].set()
        samples = await running
    sending.cancel()
    assert [sample.outcome.cause for sample in samples] == [""] * 5
    assert max(sample.ended_s for sample in samples[:3]) < min(
        sample.ended_s for sample in samples[3:]
    )


async def test_an_error_of_a_window_ends_the_mode(part: Part) -> None:
    """Its requests would wait for ever."""

    class Broken:
        async def send_whole(self, arrival: Arrival) -> Outcome:
            raise ZeroDivisionError(arrival.number)

    send = part("window_modes").in_windows(2)
    async with asyncio.timeout(GUARD_S):
        with pytest.raises(ExceptionGroup):
            await send(Broken(), [line(0), line(1)])
