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
from fleetkeeper_gateway.batch.interfaces import NotAnswered
from fleetkeeper_gateway.batch.workers import sender as module
from fleetkeeper_gateway.batch.workers.sender import UpstreamSender, retry_after
from fleetkeeper_gateway.grants.keys import KeyFiles
from fleetkeeper_gateway.grants.signer import BatchTokenReader, BatchTokenSigner
from fleetkeeper_local.control_plane.ports import free_ports

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
    options = {"key_file": None, "timeout_s": 60.0, "monotonic": clock, **changes}
    sender = UpstreamSender(url, tokens=BatchTokenSigner(keys, clock), **options)
    try:
        yield sender
    finally:
        await sender.close()


async def test_answers_that_come_at_once_take_bounded_memory(
    upstream: Upstream, keys: KeyFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no room is as one that was refused, and the next has room again."""
    monkeypatch.setattr(module, "MAX_READING_BYTES", 1_500_000)
    go_on = asyncio.Event()

    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * 1_000_000)
        await go_on.wait()
        await response.write_eof()
        return response

    upstream.script = large
    async with sending(upstream.url, keys, clock) as sender:
        tasks = [asyncio.create_task(sender.send("key-1", PATH, BODY)) for _ in range(2)]
        (refused,), (first,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        error = refused.exception()
        assert isinstance(error, NotAnswered)
        assert not error.sent
        go_on.set()
        assert len((await first).body) == 1_000_000
        assert len((await sender.send("key-1", PATH, BODY)).body) == 1_000_000


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


async def test_an_answer_says_whether_the_gateway_refused_the_line(
    upstream: Upstream, keys: KeyFiles, clock: Clock
) -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"X-Fleetkeeper-Refused": "rate_limit_exceeded"})

    async with sending(upstream.url, keys, clock) as sender:
        assert (await sender.send("key-1", PATH, BODY)).refused is None
        upstream.script = refuse
        assert (await sender.send("key-1", PATH, BODY)).refused == "rate_limit_exceeded"


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


@pytest.mark.parametrize("status", [302, 400, 429, 500, 503])
async def test_any_complete_answer_is_returned(
    upstream: Upstream, keys: KeyFiles, clock: Clock, status: int
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        headers = {"Retry-After": "7", "Location": "http://127.0.0.1:1/"}
        return web.Response(status=status, body=b"why", headers=headers)

    upstream.script = script
    async with sending(upstream.url, keys, clock) as sender:
        answer = await sender.send("key-1", PATH, BODY)
        assert (answer.status, answer.body, answer.retry_after_s) == (status, b"why", 7.0)
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


async def test_an_answer_that_is_too_large_is_given_up(
    upstream: Upstream, keys: KeyFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 200_000)

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * size)

    upstream.script = script
    async with sending(upstream.url, keys, clock) as sender:
        size = 200_000
        assert len((await sender.send("key-1", PATH, BODY)).body) == size
        size += 1
        with pytest.raises(NotAnswered, match="more than") as refused:
            await sender.send("key-1", PATH, BODY)
        assert refused.value.sent


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
