"""One key takes all that its quotas allow, and tries more. Each call of another key succeeds."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import pytest

from fleetkeeper_gateway.batch.api.key_state import MAX_DOWNLOADS, MAX_UPLOADS
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from tests.support.batch.batch_api import CHAT, ApiWorld, form, jsonl, line, until, upload_head
from tests.support.guards import GUARD_S

DATA = jsonl([line(1)])
BODY = form(("purpose", None, b"batch"), ("file", "a", DATA))
CALLS = 100


async def hold_all(world: ApiWorld, held: contextlib.AsyncExitStack) -> None:
    """Begin as many uploads and downloads of key `one` as it may, which go on for ever, and some more."""
    for _ in range(MAX_UPLOADS + 4):
        raw = await held.enter_async_context(world.connected())
        await raw.send(upload_head(len(BODY)) + BODY[:-10])
    await until(lambda: world.objects.unfinished == MAX_UPLOADS)
    record = FileRecord("file-" + "0" * 32, "one", "o", "batch_output", 20_000_000, int(world.now))
    await world.files.add(record, b"x" * record.bytes)
    for number in range(MAX_DOWNLOADS + 4):
        raw = await held.enter_async_context(world.connected())
        await raw.ask("GET", f"/v1/files/{record.id}/content")
        if number < MAX_DOWNLOADS:
            assert " 200 " in await raw.head()


async def fill_quotas(client: openai.AsyncOpenAI, file_id: str) -> None:
    """Create batches until no more may be, and call until no more calls are answered."""
    codes = set()
    for _ in range(CALLS):
        try:
            await client.batches.create(
                input_file_id=file_id, endpoint=CHAT, completion_window="24h"
            )
        except openai.RateLimitError as error:
            codes.add(error.code)
    assert codes == {"batch_quota_exceeded", "call_quota_exceeded"}


@pytest.mark.promise("batch-quotas")
async def test_a_key_that_takes_all_it_may_refuses_no_call_of_another() -> None:
    world = ApiWorld(BatchSettings(batch_key_calls=CALLS, batch_key_active=5))
    async with (
        world.running(),
        world.client() as one,
        world.client("two") as two,
        contextlib.AsyncExitStack() as held,
    ):
        file_id = (await one.files.create(file=DATA, purpose="batch")).id
        await hold_all(world, held)
        await fill_quotas(one, file_id)
        # OpenAI's client would try again after 503: here each call is tried once.
        async with asyncio.timeout(GUARD_S):
            file = await two.files.create(file=DATA, purpose="batch")
            batch = await two.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            assert [found.id async for found in two.files.list()] == [file.id]
            assert [found.id async for found in two.batches.list()] == [batch.id]
            assert (await two.files.content(file.id)).content == DATA
            assert (await two.batches.cancel(batch.id)).status == "cancelling"
            await world.batches.forget_active(world.created[-1])
            assert (await two.files.delete(file.id)).deleted
        assert world.objects.unfinished == MAX_UPLOADS
        assert world.objects.reading == MAX_DOWNLOADS
