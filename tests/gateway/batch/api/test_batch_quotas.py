"""What a key may have and do: batches, their lines, and calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai
import pytest

from fleetkeeper_gateway.batch.api.key_state import MAX_OPEN, MAX_UPLOADS, KeyState
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    Mistake,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import BrokenObject
from fleetkeeper_gateway.http.errors import Refusal
from tests.support.batch.batch_api import CHAT, ApiWorld, form, jsonl, line, until, upload_head

DATA = jsonl([line(1)])
LARGE = 50_000 * 64
"""Bytes that may have the most lines."""


async def input_file(world: ApiWorld, size: int = len(DATA), key: str = "one") -> str:
    """Store an input file of so many bytes, which nobody reads."""
    number = len(world.files.kept)
    record = FileRecord(f"file-{number:032x}", key, "in", "batch", size, int(world.now))
    await world.files.add(record, b"")
    return record.id


async def create(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return await client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h"
    )


async def validated(world: ApiWorld, record: BatchRecord, lines: int, *mistakes: Mistake) -> None:
    found = Validated(lines, "m", 1, int(world.now), mistakes)
    await world.batches.put_validated(record, found, ())


async def end(world: ApiWorld, record: BatchRecord) -> None:
    await world.batches.put_final(record, Final(Status.COMPLETED, int(world.now), Counts()))
    await world.batches.forget_active(record)


@pytest.mark.promise("batch-quotas")
async def test_a_key_has_a_number_of_lines_in_batches_that_have_not_ended() -> None:
    world = ApiWorld(BatchSettings(batch_key_lines=100_010))
    async with world.running(), world.client() as client, world.client("two") as other:
        file_id = await input_file(world, LARGE)
        await create(client, file_id)
        await create(client, file_id)
        with pytest.raises(openai.RateLimitError) as refused:
            await create(client, file_id)
        assert refused.value.code == "line_quota_exceeded"
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert "100010" in refused.value.message
        await create(other, await input_file(world, LARGE, "two"))
        # Two lines are no 50,000, once that is known; a file with mistakes has no lines that run.
        await validated(world, world.created[0], 2)
        await create(client, file_id)
        with pytest.raises(openai.RateLimitError):
            await create(client, file_id)
        await validated(world, world.created[1], 50_000, Mistake("too_many_lines", ""))
        await create(client, file_id)
        with pytest.raises(openai.RateLimitError):
            await create(client, file_id)
        await end(world, world.created[3])
        await create(client, file_id)


async def test_lines_follow_from_the_size_until_a_restart_and_then_from_what_was_read() -> None:
    world = ApiWorld(BatchSettings(batch_key_lines=100_000))
    async with world.running(), world.client() as client:
        file_id = await input_file(world, 64 * 10)
        for _ in range(100):
            await create(client, file_id)
    # What a file may have is not known any more, so all batches are read.
    for record in world.created:
        await validated(world, record, 500)
    async with world.running(), world.client() as client:
        await create(client, file_id)
        with pytest.raises(openai.RateLimitError):
            await create(client, await input_file(world, LARGE))


async def test_a_broken_record_counts_as_much_as_it_may_have() -> None:
    world = ApiWorld(BatchSettings(batch_key_lines=100_000))
    async with world.running(), world.client() as client:
        file_id = await input_file(world, LARGE)
        await create(client, file_id)
        await create(client, file_id)
        await validated(world, world.created[1], 2)
        read = world.batches.validated

        async def broken(record: BatchRecord) -> Validated | None:
            if record == world.created[0]:
                raise BrokenObject("it is broken")
            return await read(record)

        world.batches.validated = broken  # type: ignore[method-assign]
        await create(client, await input_file(world, 64 * 40_000))
        with pytest.raises(openai.RateLimitError):
            await create(client, file_id)


@pytest.mark.promise("batch-quotas")
async def test_the_batches_that_ended_first_are_deleted_for_new_ones() -> None:
    world = ApiWorld(BatchSettings(batch_key_batches=5))
    async with world.running(), world.client() as client:
        file_id = await input_file(world)
        for _ in range(5):
            await create(client, file_id)
        with pytest.raises(openai.RateLimitError) as refused:
            await create(client, file_id)
        assert refused.value.code == "batch_quota_exceeded"
        for record in world.created[1:]:
            await end(world, record)
        new = [(await create(client, file_id)).id for _ in range(3)]
        kept = [one.id async for one in client.batches.list()]
        assert kept == [*reversed(new), world.created[4].id, world.created[0].id]
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(world.created[1].id)


@pytest.mark.promise("batch-quotas")
@pytest.mark.parametrize(
    ("quotas", "code"),
    [
        (BatchSettings(batch_key_bytes=1000), "byte_quota_exceeded"),
        (BatchSettings(batch_key_files=2), "file_quota_exceeded"),
    ],
)
async def test_results_count_and_leave_no_batch_above_the_quota(
    quotas: BatchSettings, code: str
) -> None:
    world = ApiWorld(quotas)
    async with world.running(), world.client() as client, world.client("two") as other:
        file_id = await input_file(world, 10)
        await create(client, file_id)
        results = FileRecord("file-" + "f" * 32, "one", "o", "batch_output", 990, int(world.now))
        await world.files.add(results, b"")
        with pytest.raises(openai.RateLimitError) as refused:
            await create(client, file_id)
        assert refused.value.code == code
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert "DELETE /v1/files/ID" in refused.value.message
        await create(other, await input_file(world, 10, "two"))
        await client.files.delete(results.id)
        await create(client, file_id)


async def test_creating_and_cancelling_in_a_loop_keeps_a_bounded_number() -> None:
    world = ApiWorld(BatchSettings(batch_key_batches=20, batch_key_active=5))
    counted = 0
    make_room = world.batches.make_room

    async def noted(key_id: str, most: int) -> int:
        nonlocal counted
        counted += 1
        return await make_room(key_id, most)

    world.batches.make_room = noted  # type: ignore[method-assign]
    async with world.running(), world.client() as client:
        file_id = await input_file(world)
        for _ in range(50):
            await client.batches.cancel((await create(client, file_id)).id)
            await end(world, world.created[-1])
        assert len(world.batches.kept) <= 20
    # Not all batches are listed for each new one, as long as there is room.
    assert counted <= 6 + 30


async def test_a_key_has_a_number_of_calls_a_minute() -> None:
    world = ApiWorld(BatchSettings(batch_key_calls=5))
    async with world.running(), world.client() as client, world.client("two") as other:
        results = await asyncio.gather(
            *(client.files.list() for _ in range(6)), return_exceptions=True
        )
        (refused,) = [one for one in results if isinstance(one, openai.RateLimitError)]
        assert refused.code == "call_quota_exceeded"
        assert refused.response.headers["retry-after"] == "12"
        with pytest.raises(openai.RateLimitError):
            await client.get("/unknown", cast_to=object)
        await other.files.list()


def test_calls_come_back_with_time() -> None:
    key = KeyState()
    for _ in range(60):
        key.take_call(60, 100.0)
    for _ in range(3):
        # What is refused takes nothing.
        with pytest.raises(Refusal) as refused:
            key.take_call(60, 100.0)
    assert dict(refused.value.headers)[b"retry-after"] == b"1"
    for now, calls in ((102.0, 2), (3702.0, 60)):
        for _ in range(calls):
            key.take_call(60, now)
        with pytest.raises(Refusal):
            key.take_call(60, now)


def test_an_open_call_counts_until_it_ended() -> None:
    key = KeyState()
    with contextlib.ExitStack() as held:
        for _ in range(MAX_OPEN):
            held.enter_context(key.open_call())
        for _ in range(2):
            # What is refused is not open.
            with pytest.raises(Refusal) as refused, key.open_call():
                pass
        assert refused.value.status == 503
        assert dict(refused.value.headers)[b"retry-after"] == b"1"
    with contextlib.suppress(ValueError), key.open_call():
        raise ValueError
    with contextlib.ExitStack() as held:
        for _ in range(MAX_OPEN):
            held.enter_context(key.open_call())


@pytest.mark.promise("batch-quotas")
async def test_a_key_has_a_number_of_open_calls() -> None:
    """Uploads that wait for their turn hold a part of their body, for as long as the others take."""
    world = ApiWorld()
    body = form(("purpose", None, b"batch"), ("file", "a", DATA))
    async with (
        world.running(),
        world.client() as client,
        world.client("two") as other,
        contextlib.AsyncExitStack() as held,
    ):
        uploads = [await held.enter_async_context(world.connected()) for _ in range(MAX_OPEN + 3)]
        for raw in uploads[:MAX_UPLOADS]:
            await raw.send(upload_head(len(body)) + body[:-10])
        await until(lambda: world.objects.unfinished == MAX_UPLOADS)
        for raw in uploads[MAX_UPLOADS:]:
            await raw.send(upload_head(len(body)) + body[:-10])
        heads = [asyncio.create_task(raw.head()) for raw in uploads]
        await until(lambda: sum(head.done() for head in heads) == 3)
        for head in heads:
            if head.done():
                assert head.result().startswith("http/1.1 503 ")
                assert "retry-after: 1\r\n" in head.result()
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.list()
        assert refused.value.code == "too_many_open_calls"
        await other.files.create(file=DATA, purpose="batch")
        for raw, head in zip(uploads, heads, strict=True):
            if not head.done():
                await raw.send(body[-10:])
        assert sum("200 ok" in head for head in await asyncio.gather(*heads)) == MAX_OPEN
        assert len((await client.files.list()).data) == MAX_OPEN


async def test_a_broken_batch_hides_no_other_of_a_list() -> None:
    world = ApiWorld()
    async with world.running(), world.client() as client:
        file_id = await input_file(world)
        ids = [(await create(client, file_id)).id for _ in range(5)]
        final = world.batches.final

        async def broken(record: BatchRecord) -> Final | None:
            if record.id == ids[2]:
                raise BrokenObject("it is broken")
            return await final(record)

        world.batches.final = broken  # type: ignore[method-assign]
        found = [one.id async for one in client.batches.list(limit=2)]
        assert sorted(found) == sorted({*ids} - {ids[2]})

        async def failing(record: BatchRecord) -> Final | None:
            raise StorageError("the store is down")

        world.batches.final = failing  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError):
            await client.batches.list()


async def test_a_page_reads_no_more_batches_than_it_shows() -> None:
    world = ApiWorld()
    async with world.running(), world.client() as client:
        file_id = await input_file(world)
        for _ in range(100):
            await create(client, file_id)
            await end(world, world.created[-1])
        read: list[str] = []
        final = world.batches.final

        async def noted(record: BatchRecord) -> Final | None:
            read.append(record.id)
            return await final(record)

        world.batches.final = noted  # type: ignore[method-assign]
        page = await client.batches.list(limit=1)
        assert read == [one.id for one in page.data] == [world.created[-1].id]
        page = await client.batches.list(limit=2, after=world.created[50].id)
        assert [one.id for one in page.data] == [world.created[n].id for n in (49, 48)]
        assert len(read) == 3
