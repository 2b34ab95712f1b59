"""The API over the store that a single replica has: a directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import create_storage
from tests.support.batch_api import CHAT, ApiWorld, form, jsonl, line, until, upload_head

DATA = jsonl([line(number) for number in range(20_000)])
PURPOSE = ("purpose", None, b"batch")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store keeps its objects."""
    return tmp_path / "store"


@pytest.fixture
async def world(directory: Path) -> AsyncIterator[ApiWorld]:
    """An API over the directory."""
    world = ApiWorld(BatchSettings(batch_store=f"file://{directory}"))
    storage = create_storage(world.settings, wall=lambda: world.now)
    world.set(objects=storage.objects, files=storage.files, batches=storage.batches)
    async with world.running():
        yield world
    storage.close()


def sizes(directory: Path) -> list[int]:
    """Return the bytes of the files that hold more than a record. The store deletes them in a thread."""
    found = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return [size for size in found if size > 1000]


async def test_a_file_and_its_batch_are_kept_and_found_again(
    world: ApiWorld, directory: Path
) -> None:
    async with world.client() as client:
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


@pytest.mark.parametrize("end", [1000, len(DATA) // 2, -30])
async def test_a_hang_up_leaves_no_bytes(world: ApiWorld, directory: Path, end: int) -> None:
    body = form(PURPOSE, ("file", "a", DATA))
    async with world.connected() as raw:
        await raw.send(upload_head(len(body)) + body[:end])
    await world.audited("client_gone")
    await until(lambda: sizes(directory) == [])


async def test_a_refused_form_leaves_no_bytes_and_tells_why(
    world: ApiWorld, directory: Path
) -> None:
    body = form(("file", "a", DATA), ("purpose", None, b"vision"))
    async with world.connected() as raw:
        await raw.send(upload_head(len(body)) + body)
        status, answer = await raw.answer()
    assert (status, answer["error"]["param"]) == (400, "purpose")
    await until(lambda: sizes(directory) == [])


async def test_an_upload_that_is_cancelled_leaves_no_bytes(directory: Path) -> None:
    """As when the process ends: the server cancels the requests that run."""
    world = ApiWorld(BatchSettings(batch_store=f"file://{directory}"))
    storage = create_storage(world.settings)
    world.set(objects=storage.objects, files=storage.files, batches=storage.batches)
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
        before = asyncio.all_tasks()
        uploads = [task for task in before if "run_asgi" in repr(task.get_coro())]
        for task in uploads:
            task.cancel()
        await asyncio.wait(uploads)
    assert len(uploads) == 1
    await until(lambda: sizes(directory) == [])
    storage.close()
