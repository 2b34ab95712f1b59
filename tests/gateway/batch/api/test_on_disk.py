"""The API over the store that a single replica has: a directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from fleetkeeper_gateway.batch.model import Counts, Final, LineRef, Result, Status, Validated
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, create_storage
from tests.support.batch.batch_api import CHAT, ApiWorld, form, jsonl, line, until, upload_head

DATA = jsonl([line(number) for number in range(20_000)])
PURPOSE = ("purpose", None, b"batch")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store keeps its objects."""
    return tmp_path / "store"


@pytest.fixture
def storage(directory: Path) -> Iterator[Storage]:
    """A store in the directory."""
    settings = BatchSettings(batch_store=f"file://{directory}")
    with contextlib.closing(create_storage(settings)) as storage:
        yield storage


@pytest.fixture
def world(storage: Storage) -> ApiWorld:
    """An API over the store."""
    world = ApiWorld()
    world.set(objects=storage.objects, files=storage.files, batches=storage.batches)
    return world


def sizes(directory: Path) -> list[int]:
    """Return the bytes of the files that hold more than a record. The store deletes them in a thread."""
    found = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return [size for size in found if size > 1000]


async def test_a_file_and_its_batch_are_kept_and_found_again(
    world: ApiWorld, directory: Path
) -> None:
    async with world.running(), world.client() as client:
        file = await client.files.create(file=("in.jsonl", DATA), purpose="batch")
        assert sizes(directory) == [len(DATA)]
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert [one.id async for one in client.files.list()] == [file.id]
        assert [one async for one in client.batches.list()] == [batch]
        assert (await client.files.content(file.id)).content == DATA
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        with pytest.raises(openai.ConflictError):
            await client.files.delete(file.id)
        async with world.client("two") as other:
            with pytest.raises(openai.NotFoundError):
                await other.files.content(file.id)


@pytest.mark.parametrize("end", [1000, -30])
async def test_a_hang_up_leaves_no_bytes(world: ApiWorld, directory: Path, end: int) -> None:
    body = form(PURPOSE, ("file", "a", DATA))
    async with world.running(), world.connected() as raw:
        await raw.send(upload_head(len(body)) + body[:end])
    await until(lambda: sizes(directory) == [])


async def test_a_refused_form_leaves_no_bytes_and_tells_why(
    world: ApiWorld, directory: Path
) -> None:
    body = form(("file", "a", DATA), ("purpose", None, b"vision"))
    async with world.running(), world.connected() as raw:
        await raw.send(upload_head(len(body)) + body)
        status, answer = await raw.answer()
    assert (status, answer["error"]["param"]) == (400, "purpose")
    await until(lambda: sizes(directory) == [])


async def test_an_upload_that_is_cancelled_leaves_no_bytes(
    world: ApiWorld, storage: Storage, directory: Path
) -> None:
    """As when the process ends: the server cancels the requests that run."""
    write = storage.objects.write
    began = asyncio.Event()

    async def noted(path: str, parts: AsyncIterator[bytes]) -> int:
        began.set()
        return await write(path, parts)

    storage.objects.write = noted  # type: ignore[method-assign]
    body = form(PURPOSE, ("file", "a", DATA))
    async with world.running(), world.connected() as raw:
        await raw.send(upload_head(len(body)) + body[:-30])
        await began.wait()
        uploads = [task for task in asyncio.all_tasks() if "run_asgi" in repr(task.get_coro())]
        for task in uploads:
            task.cancel()
        await asyncio.wait(uploads)
    assert len(uploads) == 1
    await until(lambda: sizes(directory) == [])


async def test_progress_follows_the_parts_that_are_written(
    world: ApiWorld, storage: Storage
) -> None:
    async with world.running(), world.client() as client:
        file = await client.files.create(file=jsonl([line(n) for n in range(4)]), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        (record,) = world.created
        lines = [LineRef(number, number, 1) for number in range(4)]
        found = Validated(4, "m", 1, int(world.now))
        await storage.batches.put_validated(record, found, lines)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        log = storage.batches.log(record, 0, range(4))
        await log.append([Result(0, ok=True, text=b"{}"), Result(1, ok=False, text=b"{}")])
    # Another replica shows what is written at once.
    async with world.running(), world.client() as client:
        shown = await client.batches.retrieve(batch.id)
        assert shown.request_counts is not None
        assert shown.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 1}
        results = [Result(2, ok=True, text=b"{}"), Result(3, ok=True, text=b"{}")]
        await log.append(results, close=True)
    async with world.running(), world.client() as client:
        assert (await client.batches.retrieve(batch.id)).status == "finalizing"
        final = Final(Status.COMPLETED, int(world.now), Counts(4, 3, 1), file.id)
        await storage.batches.put_final(record, final)
        await storage.batches.forget_active(record)
        shown = await client.batches.retrieve(batch.id)
        assert (shown.status, shown.output_file_id) == ("completed", file.id)
