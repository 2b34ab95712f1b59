"""Uploads: what is stored, what is refused early, and what hang-ups leave behind: nothing."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import openai
import pytest

from fleetkeeper_gateway.batch.api import upload
from fleetkeeper_gateway.batch.api.key_state import MAX_UPLOADS
from fleetkeeper_gateway.batch.settings import BatchSettings
from tests.support.batch.batch_api import ApiWorld, form, jsonl, line, until, upload_head
from tests.support.guards import GUARD_S

PURPOSE = ("purpose", None, b"batch")
DATA = jsonl([line(1), line(2)])
FILE = ("file", "input.jsonl", DATA)


def stored(world: ApiWorld) -> list[bytes]:
    """Return the bytes of all files, which must be those of the files that exist."""
    paths = {world.files.data_path(*place) for place in world.files.kept}
    assert set(world.objects.kept) == paths
    assert world.objects.unfinished == 0
    return list(world.objects.kept.values())


async def upload_form(
    world: ApiWorld, *fields: tuple[str, str | None, bytes]
) -> tuple[int, dict[str, Any]]:
    """Send a form, and return the status and the body of the answer."""
    body = form(*fields)
    async with world.connected() as raw:
        await raw.send(upload_head(len(body)) + body)
        return await raw.answer()


async def test_a_file_is_stored_as_it_was_sent(world: ApiWorld, client: openai.AsyncOpenAI) -> None:
    data = jsonl([line(number) for number in range(20_000)])
    found = await client.files.create(file=("in put.jsonl", data), purpose="batch")
    assert stored(world) == [data]
    assert found.model_dump() == {
        "id": found.id,
        "object": "file",
        "bytes": len(data),
        "created_at": int(world.now),
        "expires_at": int(world.now) + 30 * 86_400,
        "filename": "in put.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }


async def test_the_client_without_asyncio_uploads_from_a_file_object(world: ApiWorld) -> None:
    def upload() -> tuple[str, bytes]:
        with world.sync_client() as client:
            found = client.files.create(file=io.BytesIO(DATA), purpose="batch")
            return found.filename, client.files.content(found.id).content

    assert await asyncio.to_thread(upload) == ("upload", DATA)
    assert stored(world) == [DATA]


async def test_an_expiry_is_kept(world: ApiWorld, client: openai.AsyncOpenAI) -> None:
    found = await client.files.create(
        file=DATA, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert found.expires_at == int(world.now) + 3600
    world.now += 3600
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(found.id)
    assert (await client.files.list()).data == []


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\files\\a.jsonl", "a.jsonl"),
        ("a\x00b\r\nc", "a%00b__c"),
        ("..", ".."),
        ("é" * 300, "é" * 255),
        ("dir/", "upload"),
    ],
)
async def test_a_file_name_is_a_name_and_no_path(
    world: ApiWorld, client: openai.AsyncOpenAI, sent: str, kept: str
) -> None:
    found = await client.files.create(file=(sent, DATA), purpose="batch")
    assert found.filename == kept
    content = await client.files.content(found.id)
    assert content.content == DATA


async def test_control_characters_of_a_file_name_are_replaced(world: ApiWorld) -> None:
    status, found = await upload_form(world, PURPOSE, ("file", "a\x01b\x7f.jsonl", DATA))
    assert (status, found["filename"]) == (200, "a_b_.jsonl")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([FILE], "purpose"),
        ([PURPOSE], "file"),
        ([("purpose", None, b"fine-tune"), FILE], "purpose"),
        ([FILE, ("purpose", None, b"fine-tune")], "purpose"),
        ([PURPOSE, PURPOSE, FILE], "purpose"),
        ([PURPOSE, FILE, FILE], "file"),
        ([PURPOSE, ("file", None, DATA)], "file"),
        ([PURPOSE, ("file", "a", b"")], "file"),
        ([PURPOSE, ("expires_after[anchor]", None, b"created_at"), FILE], "expires_after"),
        ([PURPOSE, ("expires_after[seconds]", None, b"1"), FILE], "expires_after[seconds]"),
        ([PURPOSE, ("expires_after[seconds]", None, b"4e3"), FILE], "expires_after[seconds]"),
        ([PURPOSE, ("expires_after[anchor]", None, b"now"), FILE], "expires_after[anchor]"),
    ],
)
async def test_a_form_with_a_wrong_field_is_refused_and_leaves_nothing(
    world: ApiWorld, fields: list[tuple[str, str | None, bytes]], param: str
) -> None:
    status, answer = await upload_form(world, *fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert stored(world) == []


async def test_fields_may_follow_the_file_and_unknown_ones_are_ignored(world: ApiWorld) -> None:
    status, _ = await upload_form(world, FILE, ("unknown", None, b"x"), PURPOSE)
    assert status == 200
    assert stored(world) == [DATA]


async def test_a_client_that_waits_for_permission_is_refused_without_it(world: ApiWorld) -> None:
    """As curl asks before it sends a large body."""
    async with world.connected() as raw:
        await raw.send(_asking(upload_head(1_000_000_000)))
        status, answer = await raw.answer()
    assert (status, answer["error"]["code"]) == (413, "file_too_large")
    assert stored(world) == []
    body = form(PURPOSE, FILE)
    async with world.connected() as raw:
        await raw.send(_asking(upload_head(len(body))))
        async with asyncio.timeout(GUARD_S):
            assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(body)
        status, _ = await raw.answer()
    assert status == 200
    assert stored(world) == [DATA]


def _asking(head: bytes) -> bytes:
    return head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")


@pytest.mark.promise("batch-bounds")
async def test_a_file_that_grows_too_large_is_refused_while_it_is_read(
    idle_world: ApiWorld,
) -> None:
    idle_world.set(max_file_bytes=100_000)
    async with idle_world.running() as world, world.connected() as raw:
        # Chunked: nothing announces the size.
        head = upload_head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        start = form(PURPOSE, ("file", "a", b""))[: -len("\r\n--the-boundary--\r\n")]
        await raw.send(head + b"%x\r\n%b\r\n" % (len(start), start))
        for _ in range(3):
            await raw.send(b"%x\r\n%b\r\n" % (40_000, b"x" * 40_000))
        status, answer = await raw.answer()
        assert (status, answer["error"]["code"]) == (413, "file_too_large")
        assert stored(world) == []


async def test_the_largest_file_is_accepted(idle_world: ApiWorld) -> None:
    idle_world.set(max_file_bytes=len(DATA))
    async with idle_world.running() as world, world.client() as client:
        await client.files.create(file=DATA, purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=DATA + b"\n", purpose="batch")
        assert refused.value.status_code == 413
        assert stored(world) == [DATA]


@pytest.mark.parametrize("end", [30, 200, -30, -3])
async def test_a_hang_up_during_an_upload_leaves_nothing(world: ApiWorld, end: int) -> None:
    body = form(PURPOSE, FILE)
    async with world.connected() as raw:
        await raw.send(upload_head(len(body)) + body[:end])
    request = await world.audited("client_gone")
    assert (request["status"], request["key_id"]) == (499, "one")
    assert stored(world) == []


@pytest.mark.promise("batch-bounds")
async def test_a_client_that_sends_little_by_little_is_cut_off(idle_world: ApiWorld) -> None:
    idle_world.set(client_timeout_s=1.0)
    async with idle_world.running() as world, world.connected() as raw:
        body = form(PURPOSE, FILE)
        await raw.send(upload_head(len(body)) + body[:100])
        answered = asyncio.create_task(raw.answer())
        sent = 100
        while not answered.done() and sent < len(body) - 1:
            await raw.send(body[sent : sent + 1])
            sent += 1
            await asyncio.wait([answered], timeout=0.1)
        status, answer = await answered
        assert (status, answer["error"]["code"]) == (408, "body_too_slow")
        assert stored(world) == []


async def test_a_store_that_fails_is_reported_and_leaves_nothing(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    world.objects.down = True
    with pytest.raises(openai.InternalServerError) as failed:
        await client.files.create(file=DATA, purpose="batch")
    assert (failed.value.status_code, failed.value.code) == (503, "storage_unavailable")
    assert failed.value.response.headers["retry-after"] == "5"
    world.objects.down = False
    world.files.put_fails = True
    with pytest.raises(openai.InternalServerError):
        await client.files.create(file=DATA, purpose="batch")
    assert stored(world) == []


async def test_a_key_that_ends_during_its_upload_stores_nothing(world: ApiWorld) -> None:
    body = form(PURPOSE, FILE)
    async with world.connected() as raw:
        await raw.send(upload_head(len(body)) + body[:-10])
        await until(lambda: world.objects.unfinished)
        world.keys.in_use.remove("one")
        await raw.send(body[-10:])
        status, answer = await raw.answer()
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert stored(world) == []


async def test_a_key_has_a_number_of_files(idle_world: ApiWorld) -> None:
    world = ApiWorld(BatchSettings(batch_key_files=2))
    async with world.running(), world.client() as client, world.client("two") as other:
        first = await client.files.create(file=DATA, purpose="batch")
        await client.files.create(file=DATA, purpose="batch")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.files.create(file=DATA, purpose="batch")
        assert refused.value.code == "file_quota_exceeded"
        assert refused.value.response.headers["x-should-retry"] == "false"
        await other.files.create(file=DATA, purpose="batch")
        await client.files.delete(first.id)
        await client.files.create(file=DATA, purpose="batch")


async def test_a_key_has_a_number_of_bytes() -> None:
    world = ApiWorld(BatchSettings(batch_key_bytes=2 * len(DATA)))
    async with world.running(), world.client() as client:
        await client.files.create(file=DATA, purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=DATA + b"\n", purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "byte_quota_exceeded")
        await client.files.create(file=DATA, purpose="batch")
        assert stored(world) == [DATA, DATA]


@pytest.mark.promise("batch-quotas")
async def test_uploads_at_the_same_time_do_not_exceed_a_quota_together() -> None:
    world = ApiWorld(BatchSettings(batch_key_files=5))
    async with world.running(), world.client() as client:
        results = await asyncio.gather(
            *(client.files.create(file=DATA, purpose="batch") for _ in range(20)),
            return_exceptions=True,
        )
        assert sum(not isinstance(one, BaseException) for one in results) == 5
        assert sum(isinstance(one, openai.RateLimitError) for one in results) == 15
        assert len(stored(world)) == 5
        assert world.objects.most_unfinished <= MAX_UPLOADS


async def test_uploads_of_a_key_leave_memory_for_those_of_others(
    idle_world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly they come: each holds parts that an object store has not confirmed."""
    monkeypatch.setattr(upload, "MEMORY_BYTES", 3 * upload.UPLOAD_BYTES)
    body = form(PURPOSE, FILE)
    async with idle_world.running() as world, world.client() as one, world.client("two") as two:
        async with world.connected() as raw:
            await raw.send(upload_head(len(body)) + body[:-10])
            await until(lambda: world.objects.unfinished)
            with pytest.raises(openai.InternalServerError) as refused:
                await one.files.create(file=DATA, purpose="batch")
            assert refused.value.response.status_code == 503
            assert refused.value.code == "bodies_full"
            assert refused.value.response.headers["retry-after"] == "1"
            await two.files.create(file=DATA, purpose="batch")
            await raw.send(body[-10:])
            status, _ = await raw.answer()
            assert status == 200
        await one.files.create(file=DATA, purpose="batch")


async def test_a_file_arrives_with_backpressure_from_the_store(world: ApiWorld) -> None:
    """A store that takes nothing stops the client, whose file is much larger than all buffers."""
    may_go_on = asyncio.Event()
    taken = 0
    write = world.objects.write

    async def slow_write(path: str, parts: object) -> int:
        async def slowly() -> object:
            nonlocal taken
            async for part in parts:  # type: ignore[attr-defined]
                taken += len(part)
                await may_go_on.wait()
                yield part

        return await write(path, slowly())  # type: ignore[arg-type]

    world.objects.write = slow_write  # type: ignore[method-assign]
    body = form(PURPOSE, ("file", "a", b"x" * 32_000_000))
    async with world.connected() as raw:
        sending = asyncio.create_task(raw.send(upload_head(len(body)) + body))
        await until(lambda: taken)
        # One part waits in the store; the kernel and the server hold a bounded rest.
        done, _ = await asyncio.wait([sending], timeout=0.5)
        assert not done
        assert taken < 1_000_000
        may_go_on.set()
        await sending
        status, found = await raw.answer()
    assert (status, found["bytes"]) == (200, 32_000_000)
