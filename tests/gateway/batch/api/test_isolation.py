"""Who may see what, and what odd paths lead to: nowhere."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support.batch.batch_api import CHAT, ApiWorld, jsonl, line

DATA = jsonl([line(1)])
SECRET = "the-secret-question"


@pytest.mark.promise("batch-isolation")
async def test_a_file_of_another_key_is_like_one_that_does_not_exist(
    world: ApiWorld, client: openai.AsyncOpenAI, other: openai.AsyncOpenAI
) -> None:
    foreign = (await client.files.create(file=DATA, purpose="batch")).id
    unknown = "file-" + "0" * 32

    for call in (other.files.retrieve, other.files.content, other.files.delete):
        bodies = []
        for file_id in (foreign, unknown):
            with pytest.raises(openai.NotFoundError) as refused:
                await call(file_id)
            bodies.append(json.dumps(refused.value.body).replace(file_id, "ID"))
        assert bodies[0] == bodies[1]
    assert (await other.files.list()).data == []
    with pytest.raises(openai.NotFoundError) as refused:
        await other.batches.create(input_file_id=foreign, endpoint=CHAT, completion_window="24h")
    assert refused.value.param == "input_file_id"
    assert world.created == []
    assert (await client.files.content(foreign)).content == DATA


@pytest.mark.promise("batch-isolation")
async def test_a_batch_of_another_key_is_like_one_that_does_not_exist(
    world: ApiWorld, client: openai.AsyncOpenAI, other: openai.AsyncOpenAI
) -> None:
    file = await client.files.create(file=DATA, purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    for call in (other.batches.retrieve, other.batches.cancel):
        bodies = []
        for batch_id in (batch.id, "batch_" + "0" * 32):
            with pytest.raises(openai.NotFoundError) as refused:
                await call(batch_id)
            bodies.append(json.dumps(refused.value.body).replace(batch_id, "ID"))
        assert bodies[0] == bodies[1]
    assert (await other.batches.list()).data == []
    assert world.batches.cancellations == {}


@pytest.mark.promise("batch-paths")
@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/..",
        "/v1/files/../batches",
        "/v1/files/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/files/%2e%2e/content",
        "/v1/files/%00",
        "/v1/files/file-%0a",
        "/v1/files/file-" + "A" * 32,
        "/v1/files/file-" + "0" * 31 + "%0a",
        "/v1/files/file-" + "0" * 32 + "%0a",
        "/v1/files/file-" + "0" * 32 + "%00/content",
        "/v1/files/" + "x" * 20_000,
        "/v1/files/%ff%fe",
        "/v1/files/",
        "/v1/files/file-" + "0" * 32 + "/content/",
        "/v1/batches/..%2f..",
        "/v1/batches/batch_" + "0" * 32 + "%2fcancel%2f",
        "/v1/batches/%F0%9F%98%80",
        "//v1/files",
        "/V1/files",
        "/",
        "/v1",
    ],
)
async def test_an_odd_path_is_not_found(world: ApiWorld, path: str) -> None:
    async with world.connected() as raw:
        await raw.ask("GET", path)
        status, answer = await raw.answer()
    assert status == 404
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) < 600


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, POST"),
        ("POST", "/v1/files/file-1", "DELETE, GET"),
        ("HEAD", "/v1/files/file-1/content", "GET"),
        ("DELETE", "/v1/batches/batch_1", "GET"),
        ("GET", "/v1/batches/batch_1/cancel", "POST"),
    ],
)
async def test_a_wrong_method_is_refused(
    world: ApiWorld, method: str, path: str, allowed: str
) -> None:
    async with world.connected() as raw:
        await raw.ask(method, path)
        head = await raw.head()
    assert head.startswith("http/1.1 405 ")
    assert f"allow: {allowed.lower()}\r\n" in head


async def test_a_request_without_a_valid_key_is_refused(world: ApiWorld) -> None:
    async with world.client("nobody") as client:
        for call in (client.files.list, client.batches.list):
            with pytest.raises(openai.AuthenticationError) as refused:
                await call()
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.files.create(file=DATA, purpose="batch")
    async with world.connected() as raw:
        await raw.send(b"GET /v1/nothing HTTP/1.1\r\nHost: test\r\n\r\n")
        status, answer = await raw.answer()
    assert (status, answer["error"]["code"]) == (401, "missing_api_key")
    assert world.objects.kept == {}


async def test_every_request_is_audited_without_content(
    world: ApiWorld, client: openai.AsyncOpenAI
) -> None:
    file = await client.files.create(
        file=(f"{SECRET}.jsonl", jsonl([line(1, custom_id=SECRET)])), purpose="batch"
    )
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"name": SECRET},
    )
    await client.files.content(file.id)
    await client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve("unknown")
    await world.audited("file_not_found")
    outcomes = [(one["key_id"], one["outcome"], one["status"]) for one in world.audit.requests]
    assert outcomes == [("one", "ok", 200)] * 4 + [("one", "file_not_found", 404)]
    assert len({one["request_id"] for one in world.audit.requests}) == 5
    assert SECRET not in str(world.audit.requests)


async def test_an_answer_has_the_id_of_its_request(world: ApiWorld) -> None:
    async with world.connected() as raw:
        await raw.ask("GET", "/v1/files", X_Request_Id="mine")
        head = await raw.head()
    request = await world.audited("ok")
    assert f"x-request-id: {request['request_id']}\r\n" in head
    assert "x-client-request-id: mine\r\n" in head
