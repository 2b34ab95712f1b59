"""Progress that is shown: read rarely, together, and never less than before."""

from __future__ import annotations

import asyncio

import openai
import pytest

from fleetkeeper_gateway.batch.api.progress import KEPT_FOR_S, BatchProgress
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    Final,
    LineRef,
    Progress,
    Status,
    Validated,
)
from tests.support.batch.batch_api import CHAT, ApiWorld, jsonl, line
from tests.support.batch.batch_memory import MemoryBatches, MemoryObjects

FOUND = Validated(10, "m", 1, 1000)


def a_batch(number: int = 1) -> BatchRecord:
    return BatchRecord(f"batch_{number:032x}", "one", "file-1", CHAT, "24h", 1000, 2000)


class Logs(MemoryBatches):
    """Logs whose readings are counted, and held if wanted."""

    def __init__(self) -> None:
        super().__init__(MemoryObjects())
        self.reads = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        self.reads += 1
        await self.may_end.wait()
        return await super().progress(record, validated)


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.logs = Logs()
        self.shown = BatchProgress(self.logs, monotonic=lambda: self.now)

    async def create(self, *numbers: int) -> None:
        for number in numbers:
            await self.logs.create(a_batch(number))

    async def completed(self, number: int = 1) -> int:
        return (await self.shown.counts(a_batch(number), FOUND)).completed


async def test_logs_are_read_at_most_once_a_second() -> None:
    world = World()
    await world.create(1, 2)
    assert [await world.completed() for _ in range(5)] == [0] * 5
    world.logs.counts[a_batch().id] = Counts(10, 4)
    world.now += KEPT_FOR_S - 0.01
    assert await world.completed() == 0
    assert world.logs.reads == 1
    world.now += 0.01
    assert await world.completed() == 4
    assert await world.completed(2) == 0
    assert world.logs.reads == 3


async def test_calls_at_the_same_time_read_the_logs_once() -> None:
    world = World()
    await world.create(1)
    world.logs.may_end.clear()
    calls = [asyncio.create_task(world.completed()) for _ in range(20)]
    await asyncio.sleep(0)
    # A client that hangs up takes the answer from nobody.
    calls[0].cancel()
    await asyncio.sleep(0)
    world.logs.may_end.set()
    assert await asyncio.gather(*calls[1:]) == [0] * 19
    assert world.logs.reads == 1


async def test_progress_never_goes_back() -> None:
    world = World()
    await world.create(1)
    shown = []
    for completed in (2, 5, 3, 0, 6, 6, 1):
        world.logs.counts[a_batch().id] = Counts(10, completed)
        world.now += KEPT_FOR_S
        shown.append(await world.completed())
    assert shown == [2, 5, 5, 5, 6, 6, 6]


async def test_a_reading_that_fails_is_not_kept() -> None:
    world = World()
    with pytest.raises(StorageError, match="gone"):
        await world.completed()
    await world.create(1)
    assert await world.completed() == 0


async def validated(world: ApiWorld, client: openai.AsyncOpenAI) -> BatchRecord:
    file = await client.files.create(file=jsonl([line(1)]), purpose="batch")
    await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    record = world.created[-1]
    await world.batches.put_validated(record, FOUND, [LineRef(0, 0, 1)])
    return record


async def test_a_batch_whose_lines_all_have_results_is_finalizing_until_its_end_is_kept(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    record = await validated(world, client)
    world.batches.counts[record.id] = Counts(10, 7, 3)
    shown = await client.batches.retrieve(record.id)
    assert shown.status == "finalizing"
    assert shown.request_counts is not None
    assert (shown.request_counts.completed, shown.request_counts.failed) == (7, 3)
    # The next reading would be a second later; the end is shown at once.
    final = Final(Status.COMPLETED, int(world.now), Counts(10, 7, 3), "file-o")
    await world.batches.put_final(record, final)
    assert (await client.batches.retrieve(record.id)).status == "completed"


async def test_logs_that_are_gone_without_an_end_are_no_progress(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    record = await validated(world, client)
    await world.batches.forget_active(record)
    with pytest.raises(openai.InternalServerError) as failed:
        await client.batches.retrieve(record.id)
    assert failed.value.status_code == 503
