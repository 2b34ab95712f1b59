"""The process, with services that sleep until a line wakes them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.batch.batch_process import (
    ENDPOINT,
    batch_surroundings,
    ended,
    line,
    lines_of,
    numbers,
    submit,
)
from tests.support.gateway.gateway_api import Manifest, service
from tests.support.gateway.gateway_surroundings import NAMESPACE

pytestmark = pytest.mark.slow

LINES = "fleetkeeper_gateway_batch_lines_total"


class SleepingUpstream:
    """A gateway whose services sleep. A line that wakes one is refused as well, and later ones are answered."""

    def __init__(self) -> None:
        self.woken: dict[str, tuple[str, float]] = {}
        """The header that woke each model, and when."""
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if body["model"] in self.woken:
            return web.json_response({"prompt": body["prompt"]})
        if header := request.headers.get("X-Fleetkeeper-Wake"):
            self.woken[body["model"]] = header, time.time()
        headers = {"X-Fleetkeeper-Refused": "service_asleep", "Retry-After": "1"}
        return web.json_response({}, status=503, headers=headers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post(ENDPOINT, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


def sleeping(name: str, wake_for_batch: str, start_s: int) -> Manifest:
    """Return a service that sleeps."""
    found = service(NAMESPACE, name)
    found["spec"]["scaling"] = {"sleep": {"wakeForBatch": wake_for_batch}}
    found["status"]["sleep"] = {"number": 3, "state": "Asleep", "startSeconds": [start_s]}
    return found


async def test_lines_wake_a_service_at_once_or_when_their_deadline_demands_it(
    tmp_path: Path,
) -> None:
    upstream = SleepingUpstream()
    async with batch_surroundings(tmp_path) as world, upstream.running():
        world.api.put(sleeping("at-once", "Always", 20))
        world.api.put(sleeping("in-time", "Deadline", 148))
        process = await world.batch(BATCH_UPSTREAM=upstream.url).start().ready()
        async with process.client(world.keys["client"]) as client:
            ids = [
                await submit(client, [line(number, model=model) for number in range(40)], window)
                for model, window in (("at-once", "24h"), ("in-time", "5m"))
            ]
            batches = [await ended(client, batch_id) for batch_id in ids]
            for batch in batches:
                assert (batch.status, batch.request_counts.completed) == ("completed", 40)
                output = await lines_of(client, batch.output_file_id)
                assert numbers(output) == list(range(40))
        assert upstream.woken["at-once"][0] == "always"
        header, at = upstream.woken["in-time"]
        assert header == "deadline"
        assert at >= batches[1].created_at + 300 - 2 * 148

        async def counted() -> bool:  # the worker processes report every two seconds
            return await process.metric(LINES, 'outcome="asleep"') >= 2

        await process.until(counted, "lines that found a service asleep are not counted")
    assert process.tracebacks() == []
