"""The connections to Prometheus: names, certificates, refusals, and answers that take long to decode."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.prometheus import Prometheus, PrometheusError, PrometheusSettings, client
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper_local.control_plane.pki import Authority
from tests.support.autoscale.control_cases import NOW
from tests.support.engine.engine_environment import free_port

PODS = {("team-a", "chat-0"): Edges(0.5, 0.05)}
PATIENT_S = 60.0
ROWS = 25_000


@asynccontextmanager
async def served(rows: list[Any], port: int = 0, **how: Any) -> AsyncIterator[int]:
    """A Prometheus that answers every query with these rows; yields its port."""
    body = json.dumps({"status": "success", "data": {"result": rows}}).encode()

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/api/v1/query", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, **how).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def reader(url: str, **settings: Any) -> AsyncIterator[Prometheus]:
    """A reader that is closed."""
    prometheus = Prometheus(PrometheusSettings(url, **({"deadline_s": PATIENT_S} | settings)))
    try:
        yield prometheus
    finally:
        await prometheus.close()


def issued(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A new authority's certificate, and what a server of 127.0.0.1 needs."""
    authority = Authority(folder, "ca").ensure()
    server = authority.issue("server", "prometheus", hosts=("127.0.0.1",), server=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server.certificate, server.key)
    return authority.certificate, context


async def test_the_ca_is_read_anew(tmp_path: Path) -> None:
    """A certificate of another authority is refused until the file has that authority."""
    file, port = tmp_path / "ca.crt", free_port()
    old, new = (issued(tmp_path / name) for name in ("old", "new"))
    shutil.copy(old[0], file)
    async with reader(f"https://127.0.0.1:{port}", ca_file=file) as prometheus:
        async with served([], port, ssl_context=old[1]):
            assert (await prometheus.observe_samples(PODS, NOW)).samples == {}
        async with served([], port, ssl_context=new[1]):
            with pytest.raises(PrometheusError, match="certificate"):
                await prometheus.observe_samples(PODS, NOW)
            shutil.copy(new[0], file)
            assert (await prometheus.observe_samples(PODS, NOW)).samples == {}
        file.unlink()
        with pytest.raises(PrometheusError, match="CA file"):
            await prometheus.observe_samples(PODS, NOW)


async def test_a_name_server_that_hangs_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ticks there are: others need the threads, for example to read pods directly."""
    lookups, end = [], threading.Event()

    def hang(*arguments: object, **_: object) -> list[object]:
        lookups.append(arguments)
        end.wait(PATIENT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with reader("http://prometheus.test:9090", deadline_s=0.1) as prometheus:
        for _ in range(3):
            with pytest.raises(PrometheusError, match="no response within"):
                await prometheus.observe_samples(PODS, NOW)
        assert len(lookups) == 1
        end.set()


async def test_a_refused_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus restarts in a moment."""
    port, sleep = free_port(), asyncio.sleep
    refused, listens = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        if seconds == client.RETRY_S:
            refused.set()
            await listens.wait()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pause)
    async with reader(f"http://127.0.0.1:{port}") as prometheus:
        reading = asyncio.create_task(prometheus.observe_samples(PODS, NOW))
        await asyncio.wait_for(refused.wait(), PATIENT_S)
        async with served([], port):
            listens.set()
            assert (await reading).samples == {}


async def test_an_error_has_no_query() -> None:
    """Prometheus' address may belong to another server."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.test ESMTP\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, reader(f"http://127.0.0.1:{port}") as prometheus:
        with pytest.raises(PrometheusError, match="unreachable") as caught:
            await prometheus.observe_samples(PODS, NOW)
    assert "query" not in str(caught.value)


async def test_others_have_turns_while_a_large_answer_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes, leases and watches share the event loop with a tick."""
    turns, during = 0, []
    decoded = client._decoded

    def watched(body: bytearray) -> list[Any]:
        before = turns
        rows = decoded(body)
        during.append(turns - before)
        return rows

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(client, "_decoded", watched)
    labels = {"namespace": "team-a", "pod": "chat-0", "tier": "standard"}
    rows = [
        {"metric": labels | {"__name__": f"fleetkeeper_{i}"}, "value": [NOW, "1"]}
        for i in range(ROWS)
    ]
    task = asyncio.create_task(others())
    async with served(rows) as port, reader(f"http://127.0.0.1:{port}") as prometheus:
        await prometheus.observe_samples(PODS, NOW)
    task.cancel()
    assert median(during) > 2
