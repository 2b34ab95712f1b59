"""Files that exist: their lists, their content and their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence

import openai
import pytest

from fleetkeeper_gateway.batch.api.files import DOWNLOAD_BYTES, MEMORY_BYTES
from fleetkeeper_gateway.batch.model import FileRecord
from tests.support.batch.batch_api import CHAT, ApiWorld, RawClient, jsonl, line, until
from tests.support.guards import GUARD_S

DATA = jsonl([line(1)])


async def create(client: openai.AsyncOpenAI, data: bytes = DATA) -> str:
    found = await client.files.create(file=data, purpose="batch")
    return str(found.id)


async def output_file(world: ApiWorld, data: bytes, key: str = "one") -> str:
    """Store an output file, as finalizing a batch does."""
    record = FileRecord(
        f"file-{len(world.files.kept):032x}",
        key,
        "out.jsonl",
        "batch_output",
        len(data),
        int(world.now),
    )
    await world.files.add(record, data)
    return record.id


async def test_a_file_is_shown_listed_read_and_deleted(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    file_id = await create(client)
    shown = await client.files.retrieve(file_id)
    assert (await client.files.list()).data == [shown]
    assert (await client.files.content(file_id)).content == DATA
    deleted = await client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file_id)
    assert world.objects.kept == {}


async def test_a_list_has_pages_in_both_orders(client: openai.AsyncOpenAI) -> None:
    ids = [await create(client) for _ in range(7)]
    assert [one.id async for one in client.files.list(limit=3, order="asc")] == ids
    assert [one.id async for one in client.files.list(limit=2)] == ids[::-1]
    page = await client.files.list(after=ids[5], limit=3)
    assert [one.id for one in page.data] == ids[4:1:-1]
    assert page.has_more
    assert (page.model_extra["first_id"], page.model_extra["last_id"]) == (ids[4], ids[2])
    last = await client.files.list(after=ids[0])
    assert (last.data, last.has_more, last.model_extra["first_id"]) == ([], False, None)


async def test_a_list_can_have_one_purpose(world: ApiWorld, client: openai.AsyncOpenAI) -> None:
    uploaded = await create(client)
    made = await output_file(world, b"{}\n")
    assert [one.id for one in (await client.files.list(purpose="batch")).data] == [uploaded]
    assert [one.id for one in (await client.files.list(purpose="batch_output")).data] == [made]
    assert len((await client.files.list()).data) == 2


async def test_a_key_has_two_lists_in_memory_until_their_clients_read_them(
    world: ApiWorld, other: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5000):
        # 16 MB: more than sockets buffer.
        record = FileRecord(f"file-{number:032x}", "one", "😀" * 255, "batch", 1, int(world.now))
        world.files.kept["one", record.id] = record
    made = []
    files_of = world.files.list

    async def counted(key_id: str) -> Sequence[FileRecord]:
        made.append(key_id)
        return await files_of(key_id)

    monkeypatch.setattr(world.files, "list", counted)
    async with contextlib.AsyncExitStack() as held:
        raws = [await held.enter_async_context(world.connected()) for _ in range(6)]
        for raw in raws[:2]:
            await raw.ask("GET", "/v1/files")
        heads = [await raw.head() for raw in raws[:2]]
        for raw in raws[2:]:
            await raw.ask("GET", "/v1/files")
        assert (await other.files.list()).data == []
        assert made == ["one", "one", "two"]
        assert len(json.loads(await raws[0].content(heads[0]))["data"]) == 5000
        assert "content-type: application/json" in await raws[2].head()
        assert len(made) == 4
        raws[1].writer.close()
        await world.audited("client_gone")
        await raws[3].head()
        assert len(made) == 5


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("limit=10001", "limit"), ("order=up", "order")],
)
async def test_a_query_that_cannot_be_is_refused(
    client: openai.AsyncOpenAI, query: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.get(f"/files?{query}", cast_to=object)
    assert refused.value.param == param


async def test_after_must_name_a_file_of_the_key(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    foreign = await output_file(world, b"{}\n", "two")
    with pytest.raises(openai.NotFoundError) as refused:
        await client.files.list(after=foreign)
    assert refused.value.param == "after"


async def test_a_large_file_is_streamed(world: ApiWorld, client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) * 40_000
    file_id = await output_file(world, data)
    async with client.files.with_streaming_response.content(file_id) as answer:
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''out.jsonl"
        assert int(answer.headers["content-length"]) == len(data)
        assert b"".join([part async for part in answer.iter_bytes()]) == data


async def test_a_stream_that_breaks_is_not_taken_for_a_whole_file(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    file_id = await output_file(world, b"x" * 1_000_000)
    world.objects.fail_streams_after = 3
    with pytest.raises(openai.APIConnectionError):
        await client.files.content(file_id)
    await world.audited("storage_unavailable")
    world.objects.fail_streams_after = 0
    with pytest.raises(openai.InternalServerError) as failed:
        await client.files.content(file_id)
    assert failed.value.status_code == 503


async def test_bytes_that_are_missing_are_not_taken_for_a_whole_file(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    file_id = await output_file(world, b"x" * 1000)
    path = world.files.data_path("one", file_id)
    world.objects.kept[path] = b"x" * 999
    with pytest.raises(openai.APIConnectionError):
        await client.files.content(file_id)
    del world.objects.kept[path]
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file_id)


async def begun(world: ApiWorld, raw: RawClient) -> None:
    """Begin a download that its client does not read to the end."""
    file_id = await output_file(world, b"x" * 50_000_000)
    await raw.ask("GET", f"/v1/files/{file_id}/content")
    await raw.reader.readexactly(1000)


async def test_a_client_that_hangs_up_ends_the_stream(world: ApiWorld) -> None:
    async with world.connected() as raw:
        await begun(world, raw)
    request = await world.audited("client_gone")
    assert request["status"] == 499


async def test_a_client_that_reads_nothing_is_cut_off(idle_world: ApiWorld) -> None:
    idle_world.set(client_timeout_s=0.3)
    async with idle_world.running() as world, world.connected() as raw:
        await begun(world, raw)
        await world.audited("client_gone")


@pytest.mark.parametrize("expires", [False, True], ids=["revoked", "expired"])
async def test_a_download_ends_with_its_key(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch, expires: bool
) -> None:
    """Also if its client reads nothing at that time."""
    end = world.now + 10
    if expires:
        monkeypatch.setattr(world.keys, "in_force", lambda _key_id, now: now < end)
    async with world.connected() as raw:
        await begun(world, raw)
        if expires:
            world.now = end
        else:
            world.keys.in_use.remove("one")
        assert (await world.audited("key_revoked"))["status"] == 499
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GUARD_S):
                assert len(await raw.reader.read(-1)) < 49_000_000
    await until(lambda: world.objects.reading == 0)


async def test_downloads_of_some_keys_leave_memory_for_others() -> None:
    """A key holds at most as much as it leaves free, so whatever some read slowly, others find room."""
    world = ApiWorld()
    world.keys.in_use |= {f"slow{number}" for number in range(30)}
    async with world.running(), contextlib.AsyncExitStack() as connections:
        refused = 0
        for number in range(30):
            key = f"slow{number}"
            file_id = await output_file(world, b"x" * 10_000_000, key)
            for _ in range(4):
                raw = await connections.enter_async_context(world.connected())
                await raw.ask("GET", f"/v1/files/{file_id}/content", key=key)
                head = await raw.head()
                refused += " 503 " in head.partition("\r\n")[0]
                assert ("retry-after: 1" in head) == (" 503 " in head.partition("\r\n")[0])
        assert world.objects.reading == 120 - refused
        assert 16 <= world.objects.reading < MEMORY_BYTES / DOWNLOAD_BYTES
    await until(lambda: world.objects.reading == 0)


async def test_a_file_that_a_batch_reads_is_not_deleted(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    file_id = await create(client)
    batch = await client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h"
    )
    with pytest.raises(openai.ConflictError) as refused:
        await client.files.delete(file_id)
    assert refused.value.code == "file_in_use"
    assert batch.id in refused.value.message
    await world.batches.forget_active(world.created[0])
    assert (await client.files.delete(file_id)).deleted


async def test_a_deletion_and_a_new_batch_do_not_both_succeed(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    for _ in range(5):
        file_id = await create(client)
        results = await asyncio.gather(
            client.files.delete(file_id),
            client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h"),
            return_exceptions=True,
        )
        was_kept = isinstance(results[0], openai.ConflictError)
        was_missing = isinstance(results[1], openai.NotFoundError)
        assert was_kept != was_missing
