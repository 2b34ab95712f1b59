"""The sender, with a server that answers in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.client_keys import ANONYMOUS
from fleetkeeper_gateway.batch.interfaces import AnswerTooLarge, NotAnswered
from fleetkeeper_gateway.batch.workers import sender as module
from fleetkeeper_gateway.batch.workers.sender import UpstreamSender, retry_after
from fleetkeeper_gateway.grants.keys import KeyFiles
from fleetkeeper_gateway.grants.signer import BatchTokenReader, BatchTokenSigner
from fleetkeeper_local.control_plane.ports import free_ports
from tests.gateway.batch.workers.memory import until

PATH = "/v1/chat/completions"
BODY = b'{"model":"m"}'
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


class Upstream:
    """A server whose answers a test scripts."""

    def __init__(self) -> None:
        self.script: Script = self.ok
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def ok(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True}, headers={"X-Request-Id": "theirs"})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append((headers, await request.read()))
        return await self.script(request)

    @property
    def headers(self) -> dict[str, str]:
        return self.received[-1][0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Upstream]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/base" + PATH, self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/base/"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream().running() as found:
        yield found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(tmp_path: Path, clock: Clock) -> KeyFiles:
    for name, text in new_grant_keys().items():
        (tmp_path / name).write_text(text)
    return KeyFiles(tmp_path, clock, clock)


@asynccontextmanager
async def sending(
    url: str, keys: KeyFiles, clock: Clock, **changes: Any
) -> AsyncIterator[UpstreamSender]:
    options = {
        "key_file": None,
        "timeout_s": 60.0,
        "answer_bytes": 8_388_608,
        "may_read": asyncio.Event(),
        "monotonic": clock,
        **changes,
    }
    if "may_read" not in changes:
        options["may_read"].set()
    sender = UpstreamSender(url, tokens=BatchTokenSigner(keys, clock), **options)
    try:
        yield sender
    finally:
        await sender.close()


class Large:
    """Answers that do not end before a test says so."""

    def __init__(self, size: int, *, says_length: bool) -> None:
        self.size, self.says_length = size, says_length
        self.go_on = asyncio.Event()
        self.begun = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if self.says_length:
            response.content_length = self.size
        await response.prepare(request)
        await response.write(b"x" * 100_000)
        self.begun += 1
        await self.go_on.wait()
        await response.write(b"x" * (self.size - 100_000))
        await response.write_eof()
        return response


@pytest.mark.parametrize("says_length", [True, False])
async def test_large_answers_are_read_as_there_is_room_and_none_is_lost(
    upstream: Upstream,
    keys: KeyFiles,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    says_length: bool,
) -> None:
    """A key that takes all the room that it may leaves some to others."""
    monkeypatch.setattr(module, "READING_BYTES", 4_000_000)
    script = upstream.script = Large(1_000_000, says_length=says_length)
    async with sending(upstream.url, keys, clock, answer_bytes=1_000_000) as sender:
        tasks = [asyncio.create_task(sender.send("key-1", PATH, BODY)) for _ in range(6)]
        await until("all answer", lambda: script.begun == 6)
        room = sender._reading
        await until("it is full", lambda: room._held["key-1"] == 2_000_000)
        other = asyncio.create_task(sender.send("key-2", PATH, BODY))
        await until("another key has room", lambda: room._held["key-2"] == 1_000_000)
        script.go_on.set()
        answers = await asyncio.gather(other, *tasks)
        assert [len(one.body) for one in answers] == [1_000_000] * 7
        assert room._free == 4_000_000


async def test_a_large_answer_waits_for_results_to_be_written_and_a_small_one_does_not(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    may_read = asyncio.Event()
    async with sending(upstream.url, keys, clock, may_read=may_read) as sender:
        assert (await sender.send("key-1", PATH, BODY)).status == 200
        script = upstream.script = Large(1_000_000, says_length=True)
        script.go_on.set()
        task = asyncio.create_task(sender.send("key-1", PATH, BODY))
        await until("it holds room", lambda: sender._reading._held["key-1"] == 1_000_000)
        await asyncio.sleep(0)
        assert not task.done()
        may_read.set()
        assert len((await task).body) == 1_000_000


async def test_a_line_is_sent_on_behalf_of_its_key(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    async with sending(upstream.url, keys, clock) as sender:
        answer = await sender.send("key-1", PATH, BODY)
        assert (answer.status, answer.body) == (200, b'{"ok": true}')
        assert (answer.request_id, answer.retry_after_s) == ("theirs", None)
        headers, body = upstream.received[0]
        assert body == BODY
        assert headers["x-inference-tier"] == "batch"
        token = headers["authorization"].removeprefix("Bearer ")
        assert BatchTokenReader(keys, clock).key_of(token) == "key-1"
        await sender.send("key-2", PATH, BODY)
        other = upstream.headers["authorization"].removeprefix("Bearer ")
        assert BatchTokenReader(keys, clock).key_of(other) == "key-2"
        assert upstream.headers["x-request-id"] != headers["x-request-id"]


async def test_a_line_wakes_its_service_only_at_a_gateway_that_knows_its_key(
    upstream: Upstream, keys: KeyFiles, clock: Clock, tmp_path: Path
) -> None:
    async with sending(upstream.url, keys, clock) as sender:
        await sender.send("key-1", PATH, BODY, "deadline")
        assert upstream.headers["x-fleetkeeper-wake"] == "deadline"
        await sender.send("key-1", PATH, BODY)
        assert "x-fleetkeeper-wake" not in upstream.headers
    file = tmp_path / "key"
    file.write_text("sk-one")
    async with sending(upstream.url, keys, clock, key_file=file) as sender:
        await sender.send("key-1", PATH, BODY, "deadline")
        assert "x-fleetkeeper-wake" not in upstream.headers


async def test_a_token_is_valid_whenever_it_is_sent(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    async with sending(upstream.url, keys, clock) as sender:
        for _ in range(30):
            await sender.send("key-1", PATH, BODY)
            token = upstream.headers["authorization"].removeprefix("Bearer ")
            assert BatchTokenReader(keys, clock).key_of(token) == "key-1"
            clock.now += 7.0


async def test_an_upstream_key_is_read_again_when_it_changes(
    upstream: Upstream, keys: KeyFiles, clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("sk-one\n")
    async with sending(upstream.url, keys, clock, key_file=file) as sender:
        await sender.send("key-1", PATH, BODY)
        assert upstream.headers["authorization"] == "Bearer sk-one"
        assert upstream.headers["x-inference-tier"] == "batch"
        new = tmp_path / "new"
        new.write_text("sk-two")
        new.replace(file)
        await sender.send("key-1", PATH, BODY)
        assert upstream.headers["authorization"] == "Bearer sk-two"
        for text in ("", "two\nlines", "schlüssel"):
            file.write_text(text)
            with pytest.raises(NotAnswered, match="must hold one API key") as refused:
                await sender.send("key-1", PATH, BODY)
            assert not refused.value.sent
        file.unlink()
        with pytest.raises(NotAnswered):
            await sender.send("key-1", PATH, BODY)
    assert len(upstream.received) == 2


async def test_without_a_key_for_grants_only_anonymous_lines_are_sent(
    upstream: Upstream, clock: Clock
) -> None:
    async with sending(upstream.url, KeyFiles(None, clock, clock), clock) as sender:
        assert (await sender.send(ANONYMOUS, PATH, BODY)).status == 200
        assert "authorization" not in upstream.headers
        with pytest.raises(NotAnswered, match="GRANT_KEYS_DIRECTORY") as refused:
            await sender.send("key-1", PATH, BODY)
        assert not refused.value.sent
    assert len(upstream.received) == 1


@pytest.mark.parametrize("refused", [None, "rate_limit_exceeded"])
@pytest.mark.parametrize("status", [302, 400, 429, 500, 503])
async def test_any_complete_answer_is_returned(
    upstream: Upstream, keys: KeyFiles, clock: Clock, status: int, refused: str | None
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        headers = {"Retry-After": "7", "Location": "http://127.0.0.1:1/"}
        if refused:
            headers["X-Fleetkeeper-Refused"] = refused
        return web.Response(status=status, body=b"why", headers=headers)

    upstream.script = script
    async with sending(upstream.url, keys, clock) as sender:
        answer = await sender.send("key-1", PATH, BODY)
        assert (answer.status, answer.body, answer.retry_after_s) == (status, b"why", 7.0)
        assert answer.refused == refused
        assert answer.request_id == upstream.headers["x-request-id"]


async def test_a_refused_connection_is_known_not_to_be_sent(keys: KeyFiles, clock: Clock) -> None:
    (port,) = free_ports(1)
    async with sending(f"http://127.0.0.1:{port}", keys, clock) as sender:
        with pytest.raises(NotAnswered) as refused:
            await sender.send("key-1", PATH, BODY)
        assert not refused.value.sent


@pytest.mark.parametrize("way", ["reset", "cut", "garbage"])
async def test_a_connection_that_breaks_may_have_been_worked_on(
    upstream: Upstream, keys: KeyFiles, clock: Clock, way: str
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if way == "garbage":
            request.transport.write(b"\x00no HTTP\r\n\r\n")
        elif way == "cut":
            request.transport.write(b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"half')
        request.transport.close()
        return web.Response()

    upstream.script = script
    async with sending(upstream.url, keys, clock) as sender:
        with pytest.raises(NotAnswered) as refused:
            await sender.send("key-1", PATH, BODY)
        assert refused.value.sent


async def test_an_answer_that_takes_too_long_is_given_up(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    upstream.script = script
    async with sending(upstream.url, keys, clock, timeout_s=0.2) as sender:
        with pytest.raises(NotAnswered, match=r"within 0\.2 s") as refused:
            await sender.send("key-1", PATH, BODY)
        assert refused.value.sent


async def test_an_answer_that_is_too_large_is_not_asked_for_again(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * size, status=status)

    upstream.script = script
    async with sending(upstream.url, keys, clock, answer_bytes=200_000) as sender:
        size, status = 200_000, 200
        assert len((await sender.send("key-1", PATH, BODY)).body) == size
        size += 1
        with pytest.raises(AnswerTooLarge, match="more than 200000 bytes") as refused:
            await sender.send("key-1", PATH, BODY)
        assert refused.value.most == 200_000
        status = 503
        assert (await sender.send("key-1", PATH, BODY)).status == 503, "it is no result"
        assert sender._reading._free == module.READING_BYTES


async def test_a_large_body_arrives_whole(upstream: Upstream, keys: KeyFiles, clock: Clock) -> None:
    body = b'"' + b"x" * 5_000_000 + b'"'
    async with sending(upstream.url, keys, clock) as sender:
        await sender.send("key-1", PATH, body)
    assert upstream.received[0][1] == body


def test_retry_after_is_a_number_or_a_date() -> None:
    now = 1_900_000_000.0
    date = format_datetime(datetime.fromtimestamp(now + 90, UTC), usegmt=True)
    past = format_datetime(datetime.fromtimestamp(now - 90, UTC), usegmt=True)
    found = [retry_after(value, now) for value in ("5", " 12 ", date, past, "0")]
    assert found == [5.0, 12.0, 90.0, 0.0, 0.0]
    for value in (None, "", "soon", "-5", "1.5", "9" * 30, "²"):
        assert retry_after(value, now) is None
