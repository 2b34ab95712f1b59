"""Batches of every size and age: large lines, many lines, large answers, deadlines, cancels, two finalizers.

The batch process, the gateway, Redis and the engine are processes of their own. The memory of the batch process and
of all that it starts stays below the limit that the chart sets.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.support.batch.batch_process import (
    BatchSurroundings,
    batch_surroundings,
    ended,
    line,
    lines_of,
    numbers,
    submit,
    until_engine,
)
from tests.support.batch.batch_tree import SAMPLE_S, a_worker, stopped, tree_of, watched_memory
from tests.support.batch.poisoned_batch import COMMAND, POISON
from tests.support.guards import GUARD_S
from tests.support.lanes import keep_first

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KIB, MIB = 1 << 10, 1 << 20
NAME = re.compile(rb'"custom_id": ?"c-(\d+)"')


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[BatchSurroundings]:
    async with batch_surroundings(tmp_path, engine_most=4096) as found:
        yield found


async def numbers_in(client: openai.AsyncOpenAI, file_id: str | None) -> list[int]:
    """Return the numbers of the lines of a file, which may be larger than memory."""
    assert file_id is not None
    found: list[int] = []
    head = b""
    """The beginning of a line, in which its name is."""
    async with client.files.with_streaming_response.content(file_id) as answer:
        async for part in answer.iter_bytes(MIB):
            first, *others = part.split(b"\n")
            head = (head + first)[:KIB]
            for begin in others:
                found += map(int, NAME.findall(head))
                head = begin[:KIB]
    assert head == b""
    return found


@pytest.mark.parametrize(
    ("count", "pad", "embedding"),
    [
        (4, 10 * MIB, 0),
        (8, 0, 290_000),  # 5 MB
        pytest.param(20, 10 * MIB, 0, marks=pytest.mark.exhaustive),
        pytest.param(50_000, 4 * KIB, 0, marks=pytest.mark.exhaustive),
        pytest.param(256, 0, 290_000, marks=pytest.mark.exhaustive),
    ],
)
async def test_lines_and_answers_of_any_size_are_passed_on(
    world: BatchSurroundings, count: int, pad: int, embedding: int
) -> None:
    text = "x" * min(pad, 200 * MIB // count - 300)
    process = await world.batch().start().ready()
    async with process.client(world.keys["client"], timeout=600.0) as client:
        async with watched_memory(process, f"{count} lines of {pad // KIB} KiB, {embedding}"):
            lines = (line(number, pad=text, numbers=embedding) for number in range(count))
            batch = await ended(client, await submit(client, lines), patience_s=1500.0)
            assert (batch.status, batch.request_counts.completed) == ("completed", count)
            assert await numbers_in(client, batch.output_file_id) == list(range(count))
        file = await client.files.retrieve(batch.output_file_id)
        assert file.bytes > count * 17 * embedding


async def test_a_batch_of_five_minutes_ends_before_one_of_fourteen_days(
    world: BatchSurroundings,
) -> None:
    process = await world.batch(BATCH_CONCURRENCY="16").start().ready()
    async with process.client(world.keys["client"]) as client:
        long = await submit(
            client, [line(number, seconds=0.2) for number in range(3000)], window="14d"
        )
        await until_engine(world.engine, "running", 8)
        short = await submit(client, [line(number) for number in range(50)], window="5m")
        batch = await ended(client, short)
        assert (batch.status, batch.request_counts.completed) == ("completed", 50)
        assert (await client.batches.retrieve(long)).status == "in_progress"


async def test_a_cancelled_batch_keeps_what_was_answered(world: BatchSurroundings) -> None:
    process = await world.batch(BATCH_CONCURRENCY="64", BATCH_END_SECONDS="1").start().ready()
    async with process.client(world.keys["client"]) as client:
        lines = [line(number, seconds=0.0 if number < 40 else 600.0) for number in range(80)]
        batch_id = await submit(client, lines)
        await until_engine(world.engine, "answered", 40)
        await until_engine(world.engine, "running", 8)
        await client.batches.cancel(batch_id)
        batch = await ended(client, batch_id)
        assert batch.status == "cancelled"
        assert numbers(await lines_of(client, batch.output_file_id)) == list(range(40))
        errors = await lines_of(client, batch.error_file_id)
        assert numbers(errors) == list(range(40, 80))
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}


async def test_an_answer_that_ends_its_reader_fails_its_own_line_alone(
    world: BatchSurroundings,
) -> None:
    process = world.batch()
    process.command = COMMAND
    await process.start().ready()
    async with process.client(world.keys["client"]) as client:
        bad = {70, 150}
        lines = [
            line(number, seconds=0.2, poison=POISON if number in bad else "")
            for number in range(200)
        ]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        errors = await lines_of(client, batch.error_file_id)
        assert numbers(errors) == sorted(bad)
        assert {one["error"]["code"] for one in errors} == {"engine_failed"}
        output = await lines_of(client, batch.output_file_id)
        assert numbers(output) == [number for number in range(200) if number not in bad]
    assert process.log.read_text().count("a worker process ended") >= 2 * len(bad)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["all processes", "a worker process"])
async def test_what_was_stopped_past_its_hold_adds_no_second_result(
    world: BatchSurroundings, what: str
) -> None:
    first = await world.batch("batch-a", BATCH_CONCURRENCY="16").start().ready()
    async with first.client(world.keys["client"]) as client:
        lines = [line(number, seconds=1.0) for number in range(300)]
        batch_id = await submit(client, lines)
        await until_engine(world.engine, "running", 8)
        second = await world.batch("batch-b", BATCH_CONCURRENCY="16").start().ready()
        frozen = tree_of(first) if what == "all processes" else [await a_worker(first)]
        with stopped(frozen):
            async with second.client(world.keys["client"]) as other:
                assert (await ended(other, batch_id)).status == "completed"
        later = await ended(client, await submit(client, lines[:20]))
        assert (later.status, later.request_counts.completed) == ("completed", 20)
        batch = await client.batches.retrieve(batch_id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (300, 0)
        assert numbers(await lines_of(client, batch.output_file_id)) == list(range(300))
    assert first.tracebacks() == second.tracebacks() == []


@pytest.mark.exhaustive
async def test_of_two_finalizers_one_counts(world: BatchSurroundings) -> None:
    """The process that leads is stopped while it writes the output file, and woken when another has ended."""
    first = await world.batch("batch-a").start().ready()
    count = 64
    lines = [line(number, numbers=290_000) for number in range(count)]
    async with first.client(world.keys["client"], timeout=600.0) as client:
        while True:
            batch_id = await submit(client, lines)
            await until_status(client, batch_id, "finalizing", "completed")
            with stopped(tree_of(first)):
                second = await world.batch("batch-b").start().ready()
                async with second.client(world.keys["client"], timeout=600.0) as other:
                    if (await other.batches.retrieve(batch_id)).status == "completed":
                        await second.stop()
                        continue  # it was faster
                    batch = await ended(other, batch_id)
            break
        assert (batch.status, batch.request_counts.completed) == ("completed", count)
        later = await ended(client, await submit(client, [line(0)]))
        assert later.status == "completed"
        assert await client.batches.retrieve(batch_id) == batch
        assert await numbers_in(client, batch.output_file_id) == list(range(count))
        files = [one.id async for one in client.files.list(purpose="batch_output")]
        assert files.count(batch.output_file_id) == 1
        assert len(files) == 1 + 1, "what the second one wrote is deleted"


async def until_status(client: openai.AsyncOpenAI, batch_id: str, *wanted: str) -> None:
    """Wait until a batch has one of these statuses."""
    async with asyncio.timeout(GUARD_S):
        while (await client.batches.retrieve(batch_id)).status not in wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("each", keep_first(1, [1, 8], pytest.mark.exhaustive))
async def test_thirty_keys_that_read_slowly_stay_below_the_limit(
    world: BatchSurroundings, each: int
) -> None:
    process = await world.batch().start().ready()
    data = bytes(range(256)) * (64 * KIB)  # 16 MiB
    keys = [world.add_key(f"key-{number}") for number in range(30)]
    files = {}
    for key in keys:
        async with process.client(key, timeout=600.0) as client:
            files[key] = (await client.files.create(file=("f", data), purpose="batch")).id
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=KIB) as session,
        watched_memory(process, f"30 keys that download {each} files each") as memory,
        AsyncExitStack() as stack,
    ):
        opened = []
        for key in keys * each:
            answer = await stack.enter_async_context(
                session.get(
                    f"{process.url}/v1/files/{files[key]}/content",
                    headers={"Authorization": f"Bearer {key}"},
                )
            )
            assert answer.status in {200, 429, 503}
            opened += [answer] if answer.status == 200 else []
        for _ in range(8):  # nobody reads, and what is sent meets full buffers
            await asyncio.to_thread(memory.sample)
            await asyncio.sleep(SAMPLE_S)
        print(f"{len(opened)} of {30 * each} downloads at once", flush=True)
        for answer in opened:
            assert await answer.read() == data
    for key in keys:
        async with process.client(key, timeout=600.0) as client:
            assert (await client.files.content(files[key])).content == data
