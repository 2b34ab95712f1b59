"""Batches: what is accepted, what is kept, and what their state is shown to be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from fleetkeeper_gateway.batch.api.batch_request import ENDPOINTS
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Progress,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from tests.support.batch.batch_api import CHAT, ApiWorld, jsonl, line

DATA = jsonl([line(1)])
EXPIRY = "output_expires_after"


@pytest.fixture
async def file_id(client: openai.AsyncOpenAI) -> str:
    """An input file of key `one`."""
    found = await client.files.create(file=DATA, purpose="batch")
    return str(found.id)


async def create(client: openai.AsyncOpenAI, file_id: str, **changes: Any) -> Any:
    fields = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return await client.batches.create(**(fields | changes))


async def validate(world: ApiWorld, record: BatchRecord, lines: int = 2) -> None:
    """Keep that an input file is valid, as its validation does."""
    refs = [LineRef(number, number, 1) for number in range(lines)]
    validated = Validated(lines, "m", 100, int(world.now))
    await world.batches.put_validated(record, validated, refs)


async def test_a_new_batch_is_validating_and_its_validation_begins(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    batch = await create(client, file_id, metadata={"team": "a"})
    (record,) = world.created
    assert world.batches.kept == {batch.id: record}
    assert record == BatchRecord(
        id=batch.id,
        key_id="one",
        input_file=file_id,
        endpoint=CHAT,
        completion_window="24h",
        created=int(world.now),
        expires=int(world.now) + 86_400,
        metadata={"team": "a"},
    )
    shown = batch.model_dump()
    times = {name: shown.pop(name) for name in list(shown) if name.endswith("_at")}
    assert {name: value for name, value in times.items() if value is not None} == {
        "created_at": record.created,
        "expires_at": record.expires,
    }
    assert shown == {
        "id": batch.id,
        "object": "batch",
        "endpoint": CHAT,
        "model": None,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": {"team": "a"},
        "usage": None,
    }
    assert await client.batches.retrieve(batch.id) == batch


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("5m", 300), ("90m", 5400), ("1h", 3600), ("24h", 86_400), ("14d", 14 * 86_400)],
)
async def test_a_window_is_a_number_of_minutes_hours_or_days(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str, window: str, seconds: int
) -> None:
    batch = await create(client, file_id, completion_window=window)
    assert batch.completion_window == window
    assert batch.expires_at == int(world.now) + seconds


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"completion_window": "4m"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "-24h"}, "completion_window"),
        ({"completion_window": "24h\n"}, "completion_window"),
        ({"completion_window": "٢٤h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/tokenize"}, "endpoint"),
        ({"endpoint": "/v1/chat/completions/"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {f"n{number}": "" for number in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: ""}}, "metadata"),
        ({"metadata": {"n": "v" * 513}}, "metadata"),
        ({"metadata": {"n": 1}}, "metadata"),
        ({"metadata": ["n"]}, "metadata"),
        ({EXPIRY: {"anchor": "created_at", "seconds": 3599}}, f"{EXPIRY}.seconds"),
        ({EXPIRY: {"anchor": "created_at", "seconds": True}}, f"{EXPIRY}.seconds"),
        ({EXPIRY: {"anchor": "now", "seconds": 3600}}, f"{EXPIRY}.anchor"),
        ({EXPIRY: {"seconds": 3600}}, EXPIRY),
        ({"extra_body": {"priority": 1}}, "priority"),
    ],
)
async def test_a_wrong_parameter_is_refused(
    world: ApiWorld,
    client: openai.AsyncOpenAI,
    file_id: str,
    changes: dict[str, Any],
    param: str,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, file_id, **changes)
    assert refused.value.param == param
    assert world.created == []
    assert world.batches.kept == {}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b"", "invalid_json", id="empty"),
        pytest.param(b"[]", "invalid_json", id="list"),
        pytest.param(b"{", "invalid_json", id="broken"),
        pytest.param(b'{"endpoint":"\xff"}', "invalid_json", id="utf-8"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, "too_deep", id="deep"),
        pytest.param(b"[" * 20_001, "too_many_values", id="values"),
        pytest.param(b'{"endpoint":"a","endpoint":"b"}', "duplicate_field", id="twice"),
        pytest.param(b'{"metadata":{"a":"1","a":"2"}}', "duplicate_field", id="nested twice"),
        pytest.param(b"{}", "missing_parameter", id="missing"),
        pytest.param(
            b'{"input_file_id":"f","endpoint":"/v1/embeddings","completion_window":"1h",'
            b'"metadata":{"a":"\\ud800"}}',
            "invalid_value",
            id="surrogate",
        ),
        pytest.param(b'{"input_file_id":"' + b"x" * 100_000 + b'"}', "body_too_large", id="large"),
    ],
)
async def test_a_wrong_body_is_refused(world: ApiWorld, body: bytes, code: str) -> None:
    async with world.connected() as raw:
        await raw.ask("POST", "/v1/batches", body, Content_Type="application/json")
        status, answer = await raw.answer()
    assert (status, answer["error"]["code"]) == (413 if code == "body_too_large" else 400, code)


async def test_the_input_must_be_a_file_for_batches(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    for unknown in ("file-" + "0" * 32, "../" + file_id, file_id + "\n", ""):
        with pytest.raises(openai.NotFoundError) as missing:
            await create(client, unknown)
        assert missing.value.param == "input_file_id"
    output = FileRecord("file-" + "1" * 32, "one", "o", "batch_output", 1, int(world.now))
    await world.files.add(output, b"x")
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, output.id)
    assert refused.value.code == "wrong_purpose"
    world.now += 31 * 86_400
    with pytest.raises(openai.NotFoundError):
        await create(client, file_id)
    assert world.created == []


async def test_every_endpoint_that_needs_the_model_is_accepted(
    client: openai.AsyncOpenAI, file_id: str
) -> None:
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
    } < ENDPOINTS
    for endpoint in ENDPOINTS:
        assert (await create(client, file_id, endpoint=endpoint)).endpoint == endpoint


async def test_limits_of_metadata_and_output_expiry_are_inclusive(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    metadata = {f"{number:064}": "é" * 512 for number in range(16)}
    batch = await create(
        client,
        file_id,
        metadata=metadata,
        output_expires_after={"anchor": "created_at", "seconds": 2_592_000},
    )
    assert batch.metadata == metadata
    assert world.created[0].output_expires_after == 2_592_000


async def test_progress_and_the_end_are_shown(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    batch = await create(client, file_id)
    (record,) = world.created
    world.now += 10
    await validate(world, record)
    shown = await client.batches.retrieve(batch.id)
    assert (shown.status, shown.model, shown.in_progress_at) == ("in_progress", "m", int(world.now))
    assert shown.request_counts.model_dump() == {"total": 2, "completed": 0, "failed": 0}

    end = Final(Status.COMPLETED, int(world.now) + 5, Counts(2, 1, 1), "file-o", "file-e")
    await world.batches.put_final(record, end)
    await world.batches.forget_active(record)
    shown = await client.batches.retrieve(batch.id)
    assert (shown.status, shown.completed_at) == ("completed", int(world.now) + 5)
    assert (shown.output_file_id, shown.error_file_id) == ("file-o", "file-e")
    assert shown.request_counts.completed == 1


async def test_a_batch_that_ends_while_it_is_read_is_shown_as_ended(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    batch = await create(client, file_id)
    (record,) = world.created
    await validate(world, record)

    progress = world.batches.progress

    async def ended(record: BatchRecord, validated: Validated) -> Progress:
        await world.batches.put_final(record, Final(Status.COMPLETED, int(world.now), Counts(2, 2)))
        await world.batches.forget_active(record)
        return await progress(record, validated)

    world.batches.progress = ended  # type: ignore[method-assign]
    shown = await client.batches.retrieve(batch.id)
    assert (shown.status, shown.request_counts.completed) == ("completed", 2)


async def test_a_cancelled_batch_keeps_the_time_of_the_first_call(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    batch = await create(client, file_id)
    (record,) = world.created
    await validate(world, record)
    first_at = int(world.now)
    assert (await client.batches.cancel(batch.id)).cancelling_at == first_at
    world.now += 60
    again = await client.batches.cancel(batch.id)
    assert (again.status, again.cancelling_at) == ("cancelling", first_at)
    await world.batches.put_final(record, Final(Status.CANCELLED, int(world.now), Counts(2)))
    assert (await client.batches.retrieve(batch.id)).cancelled_at == int(world.now)
    with pytest.raises(openai.ConflictError) as refused:
        await client.batches.cancel(batch.id)
    assert refused.value.code == "batch_has_ended"
    assert "'cancelled'" in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_a_list_has_pages_newest_first(client: openai.AsyncOpenAI, file_id: str) -> None:
    ids = [(await create(client, file_id)).id for _ in range(25)]
    first = await client.batches.list()
    assert [one.id for one in first.data] == ids[:4:-1]
    assert first.has_more
    assert [one.id async for one in client.batches.list(limit=7)] == ids[::-1]
    with pytest.raises(openai.BadRequestError):
        await client.batches.list(limit=101)
    with pytest.raises(openai.NotFoundError):
        await client.batches.list(after="batch_" + "0" * 32)


@pytest.mark.promise("batch-quotas")
async def test_a_key_has_a_number_of_batches_that_have_not_ended() -> None:
    """Also if they are created at the same time, and the store takes its time."""
    world = ApiWorld(BatchSettings(batch_key_active=3))
    active_ids = world.batches.active_ids

    async def slow(key_id: str) -> Sequence[str]:
        found = await active_ids(key_id)
        for _ in range(100):  # the others run meanwhile
            await asyncio.sleep(0)
        return found

    world.batches.active_ids = slow  # type: ignore[method-assign]
    async with world.running(), world.client() as client, world.client("two") as other:
        file = await client.files.create(file=DATA, purpose="batch")
        results = await asyncio.gather(
            *(create(client, file.id) for _ in range(10)), return_exceptions=True
        )
        refusals = [one for one in results if isinstance(one, openai.RateLimitError)]
        assert len(refusals) == 7
        assert refusals[0].code == "batch_quota_exceeded"
        assert len(world.created) == 3
        foreign = await other.files.create(file=DATA, purpose="batch")
        await create(other, foreign.id)
        await world.batches.forget_active(world.created[0])
        await create(client, file.id)


async def test_a_defect_is_reported_without_content(
    world: ApiWorld, client: openai.AsyncOpenAI, file_id: str
) -> None:
    async def broken(record: BatchRecord) -> bool:
        raise RuntimeError("the-secret")

    world.batches.create = broken  # type: ignore[method-assign]
    with pytest.raises(openai.InternalServerError) as failed:
        await create(client, file_id)
    assert failed.value.code == "internal_error"
    assert "the-secret" not in str(failed.value.body)
