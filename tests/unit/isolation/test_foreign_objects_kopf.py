"""kopf ends at the first answer that it cannot decode, so it is given none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kopf._cogs.clients.errors import APIServerError, check_response

from fleetkeeper.adapters.kubernetes.kopf_session import MIN_WATCH_S, DecodableResponse
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper_kube.bounds import ANSWER_BYTES
from fleetkeeper_kube.errors import NotTaken
from fleetkeeper_kube.reading import UNREAD

pytestmark = pytest.mark.slow

DEEP = '{"f:a":' * 2000 + "{}" + "}" * 2000


def custom(name: str, fields: str = "{}") -> str:
    """An InferenceService as the API server writes one: its fields sorted."""
    return (
        '{"apiVersion":"fleetkeeper.io/v1alpha1","kind":"InferenceService","metadata":{'
        '"annotations":{"x":"\\"name\\":\\"y\\",\\"namespace\\":\\"b\\""},"generation":1,'
        f'"managedFields":[{{"fieldsV1":{fields},"manager":"m"}}],"name":"{name}",'
        '"namespace":"a","ownerReferences":[{"apiVersion":"v1","kind":"K","name":"o","uid":"z"}],'
        '"resourceVersion":"7","uid":"u1"},"spec":{"replicas":1}}'
    )


@asynccontextmanager
async def answered(body: str, status: int = 200) -> AsyncIterator[aiohttp.ClientResponse]:
    """What kopf gets for this body."""

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with (
            aiohttp.ClientSession(response_class=DecodableResponse) as session,
            session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as response,
        ):
            yield response
    finally:
        await runner.cleanup()


async def lines(body: str) -> list[Any]:
    async with answered(body) as response:
        return [json.loads(line) async for line in response.content.iter_chunked(1024)]


async def test_an_event_that_cannot_be_decoded_comes_as_a_stand_in_and_others_as_they_are() -> None:
    events = [
        f'{{"type":"ADDED","object":{custom("one")}}}',
        f'{{"type":"MODIFIED","object":{custom("deep", DEEP)}}}',
        f'{{"type":"ADDED","object":{custom("two")}}}',
    ]
    one, deep, two = await lines("\n".join(events) + "\n")
    assert [one, two] == [json.loads(events[0]), json.loads(events[2])]
    assert deep["type"] == "MODIFIED"
    assert deep["object"]["metadata"] == {
        "name": "deep",
        "namespace": "a",
        "uid": "u1",
        "resourceVersion": "7",
    }
    assert UNREAD in deep["object"]
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.put_service(deep["object"])
    (found,) = cache.unreadable(Key("a", "deep"))
    assert found.kind == "InferenceService"


@pytest.mark.parametrize("body", [f'{{"type":"ADDED","object":{DEEP}}}', "y" * (ANSWER_BYTES + 9)])
async def test_an_event_that_names_no_object_is_left_out(body: str) -> None:
    whole = f'{{"type":"ADDED","object":{custom("two")}}}'
    assert await lines(f"{body}\n{whole}\n") == [json.loads(whole)]


@pytest.mark.parametrize(("token", "following"), [('"continue":"t",', "t"), ("", "")])
async def test_a_page_that_cannot_be_decoded_has_no_items_and_goes_on(
    token: str, following: str
) -> None:
    """Its objects come with the resync, which reads them one by one."""
    body = (
        f'{{"apiVersion":"v","items":[{custom("one")},{custom("deep", DEEP)}],"kind":"L",'
        f'"metadata":{{{token}"resourceVersion":"70"}}}}\n'
    )
    async with answered(body) as response:
        page = await response.json()
    assert page == {"metadata": {"resourceVersion": "70", "continue": following}, "items": []}


async def test_an_object_cannot_pass_for_another_one() -> None:
    """Whatever its owner writes into managedFields, annotations or owner references."""
    fake = (
        '"name":"other","namespace":"b","resourceVersion":"99","uid":"u9"},"metadata":{'
        '"name":"other","namespace":"b","uid":"u9","resourceVersion":"99"'
    )
    fields = f'{{"x":{{{fake}}},"f:a":{DEEP}}}'
    live = custom("deep", fields).replace('"name":"o"', '"name":"]},{\\"uid\\":["')
    (event,) = await lines(f'{{"type":"ADDED","object":{live}}}\n')
    assert (event["object"]["metadata"]["namespace"], event["object"]["metadata"]["name"]) == (
        "a",
        "deep",
    )


async def test_a_page_that_can_be_decoded_is_whole() -> None:
    body = f'{{"items":[{custom("one")}],"metadata":{{"resourceVersion":"70"}}}}'
    async with answered(body) as response:
        assert await response.json() == json.loads(body)


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, DEEP, NotTaken),
        (200, "<html>", aiohttp.ClientPayloadError),
        (503, "no upstream", json.JSONDecodeError),
    ],
)
async def test_what_is_no_list_fails_as_kopf_expects(
    status: int, body: str, problem: type[Exception]
) -> None:
    """kopf asks again after a broken answer and an error in plain words; another exception ends it."""
    async with answered(body, status) as response:
        with pytest.raises(problem):
            await response.json()


async def test_a_line_that_is_not_json_is_a_broken_connection() -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        await lines("<html>\n")


async def test_half_a_line_at_the_end_is_no_event() -> None:
    assert await lines('{"type":"ADD') == []


async def test_an_error_in_plain_words_is_an_error_of_the_server() -> None:
    async with answered("no upstream", 503) as response:
        with pytest.raises(APIServerError, match="no upstream"):
            await check_response(response)


async def test_a_watch_that_ends_at_once_is_not_reopened_at_once() -> None:
    """kopf reopens a watch without a pause: 5,639 requests in 2 s, counted with such an API server."""
    began = asyncio.get_running_loop().time()
    assert await lines("") == []
    assert asyncio.get_running_loop().time() - began >= MIN_WATCH_S
