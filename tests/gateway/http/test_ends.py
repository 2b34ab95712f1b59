"""What ends a request from outside: its key, its time, the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import psutil
import pytest
from aiohttp import web

from fleetkeeper_gateway.interfaces import Key
from fleetkeeper_gateway.serve import main
from fleetkeeper_gateway.server import CannotStart
from tests.gateway.http.world import AUTHORIZATION, CHAT, PROMPT, SECRET, StandIn, World, chat, head
from tests.support.guards import GUARD_S


class Stream:
    """A script that sends a frame, and then waits for a test."""

    def __init__(self) -> None:
        self.proceed = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await self.proceed.wait()
        await response.write(b"last")
        return response


async def _never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.promise("key-revoked")
async def test_a_key_that_is_revoked_ends_its_streams_visibly_and_no_other(world: World) -> None:
    stream = world.upstream.script = Stream()
    world.keys.known["Bearer other"] = Key("key-2", "other", None)
    async with world.post() as revoked, world.post(Authorization="Bearer other") as other:
        assert await revoked.content.readany() == b"first"
        world.keys.revoked.add("key-1")
        started = time.monotonic()
        with pytest.raises(aiohttp.ClientPayloadError):
            await revoked.content.read()
        async with asyncio.timeout(GUARD_S):
            await world.upstream.gone.wait()
        print(f"ended after {time.monotonic() - started:.2f} s")
        stream.proceed.set()
        assert await other.content.read() == b"firstlast"
    outcomes = {one["key_id"]: one["outcome"] for one in world.audit.requests}
    assert outcomes == {"key-1": "key_revoked", "key-2": "ok"}


async def test_a_key_that_is_revoked_before_the_answer_is_refused(world: World) -> None:
    world.upstream.script = _never
    asking = asyncio.create_task(world.refused())
    await world.until(lambda: len(world.upstream.received) == 1)
    world.keys.revoked.add("key-1")
    assert await asking == (401, "invalid_api_key")


async def test_a_request_above_its_longest_time_ends(idle_world: World) -> None:
    async with idle_world.running(request_timeout_seconds=0.2) as world:
        world.upstream.script = _never
        assert await world.refused() == (504, "request_timeout")
        world.upstream.script = Stream()
        async with world.post() as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()


async def test_an_answer_that_stops_ends_but_one_that_has_not_begun_may_take_longer(
    idle_world: World,
) -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return web.Response(text="late")

    async with idle_world.running(idle_timeout_seconds=0.2) as world:
        world.upstream.script = late
        async with world.post() as response:
            assert await response.text() == "late"
        world.upstream.script = Stream()
        async with world.post() as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
    assert [one["outcome"] for one in world.audit.requests] == ["ok", "idle"]


async def test_a_drain_lets_open_requests_end(idle_world: World) -> None:
    stream = idle_world.upstream.script = Stream()
    async with idle_world.running(drain_seconds=GUARD_S) as world, world.post() as response:
        assert await response.content.readany() == b"first"
        world.signals.receive()
        await world.until(lambda: world.gateway.draining)
        async with world.client.get(world.admin_url("/healthz/ready")) as ready:
            assert ready.status == 503
        async with world.client.get(world.admin_url("/healthz/live")) as live:
            assert live.status == 200
        stream.proceed.set()
        assert await response.content.read() == b"last"
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait({world.task})


async def test_the_end_of_a_drain_aborts_streams_visibly(idle_world: World) -> None:
    idle_world.upstream.script = Stream()
    async with idle_world.running(drain_seconds=0.2) as world, world.post() as response:
        assert await response.content.readany() == b"first"
        world.signals.receive()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert world.audit.requests[0]["outcome"] == "draining"
    assert world.limiter.admissions[0].released == [True]


async def test_the_end_of_a_drain_answers_requests_whose_answer_has_not_begun(
    idle_world: World,
) -> None:
    """One that was sent may have run. A 503 would have a gateway before this one repeat it."""
    idle_world.upstream.script = _never
    async with idle_world.running(drain_seconds=0.2) as world:
        asking = asyncio.create_task(world.refused())
        await world.until(lambda: len(world.upstream.received) == 1)
        world.signals.receive()
        assert await asking == (502, "upstream_failed")


async def test_the_end_of_a_drain_says_that_a_request_was_not_sent(idle_world: World) -> None:
    """Its body is not complete yet."""
    async with idle_world.running(drain_seconds=0.2, client_timeout_seconds=GUARD_S) as world:
        reader, writer = await world.raw(head("Content-Length: 2") + b"{")
        await world.until(lambda: world.gateway.open_requests.count == 1)
        world.signals.receive()
        async with asyncio.timeout(GUARD_S):
            assert b" 503 " in await reader.readline()
            answered = await reader.read()
        writer.close()
        assert json.loads(answered.split(b"\r\n\r\n")[1])["error"]["code"] == "draining"


OPEN_FILES = 256
"""The soft limit with which the process starts."""


class Process:
    """The gateway as a process, with its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.port = 0
        self.admin_port = 0

    async def until_line(self, text: str) -> dict[str, object]:
        assert self.process.stderr is not None
        async with asyncio.timeout(GUARD_S):
            while True:
                line = (await self.process.stderr.readline()).decode()
                assert line, "".join(self.lines)
                self.lines.append(line)
                if text in line:
                    parsed: dict[str, object] = json.loads(line)
                    return parsed

    async def end(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(GUARD_S):
            self.lines.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@contextlib.asynccontextmanager
async def _process(upstream: StandIn) -> AsyncIterator[Process]:
    own = {"HOST": "127.0.0.1", "PORT": "0", "ADMIN_PORT": "0", "DRAIN_SECONDS": "80"}
    environment = {f"FLEETKEEPER_GATEWAY_{name}": value for name, value in own.items()}
    started = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f'ulimit -Sn {OPEN_FILES}; exec "$0" "$@"',
        sys.executable,
        "-m",
        "tests.gateway.http.gateway_process",
        upstream.url,
        env=os.environ | environment | {"FLEETKEEPER_GATEWAY_LOG_LEVEL": "debug"},
        stderr=asyncio.subprocess.PIPE,
    )
    process = Process(started)
    try:
        line = await process.until_line("gateway serves")
        addresses = [line["requests"], line["admin"]]
        process.port, process.admin_port = (one[1] for one in addresses if isinstance(one, list))
        yield process
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def test_signals_drain_and_then_end_the_process(
    upstream: StandIn, client: aiohttp.ClientSession
) -> None:
    upstream.script = Stream()
    headers = {"Authorization": AUTHORIZATION}
    async with _process(upstream) as process:
        url = f"http://127.0.0.1:{process.port}{CHAT}"
        async with client.post(url, data=chat(), headers=headers) as response:
            assert await response.content.readany() == b"first"
            # A stream takes two files.
            files, _ = psutil.Process(process.process.pid).rlimit(psutil.RLIMIT_NOFILE)
            assert files > OPEN_FILES
            process.process.send_signal(signal.SIGTERM)
            await process.until_line("draining")
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert await process.end() == 0


@pytest.mark.promise("logs-without-content")
async def test_neither_keys_nor_prompts_reach_the_log(
    upstream: StandIn, client: aiohttp.ClientSession
) -> None:
    """Whatever happens to a request, at the level debug."""
    stream = Stream()
    headers = {"Authorization": AUTHORIZATION, "X-Api-Key": SECRET}

    async def lost(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        raise ConnectionError

    async with _process(upstream) as process:
        url = f"http://127.0.0.1:{process.port}{CHAT}"
        broken = chat() + b"}" + PROMPT.encode()
        for body in (chat(), broken, chat(model=PROMPT), chat(x=PROMPT * 10_000), b"\xff"):
            async with client.post(url, data=body, headers=headers) as response:
                await response.read()
        async with client.post(url, data=chat(), headers={"Authorization": SECRET}) as response:
            assert response.status == 401
        upstream.script = lost
        async with client.post(url, data=chat(), headers=headers) as response:
            assert response.status == 502
        upstream.script = stream
        async with client.post(url, data=chat(), headers=headers) as response:
            assert await response.content.readany() == b"first"
        async with asyncio.timeout(GUARD_S):
            await upstream.gone.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        writer.write(b"POST / HTTP/1.1\r\nAuthorization : " + SECRET.encode() + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        admin = f"http://127.0.0.1:{process.admin_port}/metrics"
        async with client.get(admin) as response:
            metrics = await response.text()
        process.process.send_signal(signal.SIGTERM)
        assert await process.end() == 0
    log = "".join(process.lines)
    assert "request failed after it was sent" in log
    for text in (SECRET, PROMPT):
        assert text not in log
        assert text not in metrics
    assert "Traceback" not in log
    assert 'fleetkeeper_gateway_refused_total{code="invalid_json"} 2.0' in metrics
    assert 'fleetkeeper_gateway_aborted_total{reason="client_gone"} 1.0' in metrics
    assert "key-1" not in metrics


def test_settings_that_are_wrong_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_REQUEST_BYTES", "many")
    assert main() == 2
    assert "request_bytes" in capsys.readouterr().err


async def test_an_address_that_is_taken_is_named(idle_world: World) -> None:
    port = int(idle_world.upstream.url.rpartition(":")[2])
    with pytest.raises(CannotStart, match=rf"cannot listen on 127\.0\.0\.1 port {port}"):
        async with idle_world.running(port=port):
            pass
