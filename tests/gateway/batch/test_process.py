"""The process itself, with a real gateway, a real Redis, and an engine as a process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from fleetkeeper_gateway.batch.model import BatchRecord, FileRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import create_storage
from tests.support.batch.batch_process import (
    ENDPOINT,
    BatchProcess,
    BatchSurroundings,
    batch_surroundings,
    ended,
    jsonl,
    line,
    lines_of,
    numbers,
    submit,
)
from tests.support.gateway.gateway_surroundings import MODEL, NAMESPACE

pytestmark = pytest.mark.slow


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[BatchSurroundings]:
    async with batch_surroundings(tmp_path) as found:
        yield found


async def until(process: BatchProcess, what: str, name: str, least: float, *labels: str) -> None:
    """Wait until a metric has a value."""

    async def reached() -> bool:
        return await process.metric(name, *labels) >= least

    await process.until(reached, what)


async def test_the_official_client_runs_a_batch(world: BatchSurroundings) -> None:
    process = await world.batch().start().ready()
    async with process.client(world.keys["client"]) as client:
        lines = [line(number, wrong=number % 10 == 3) for number in range(100)]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 90, 10)
        output = await lines_of(client, batch.output_file_id)
        errors = await lines_of(client, batch.error_file_id)
        assert numbers(output) == [number for number in range(100) if number % 10 != 3]
        assert numbers(errors) == list(range(3, 100, 10))
        for one in output:
            body = one["response"]["body"]
            assert (body["prompt"], body["tier"]) == (one["custom_id"].removeprefix("c-"), "batch")
        assert {one["response"]["status_code"] for one in errors} == {400}
        await until(
            process, "not counted", "fleetkeeper_gateway_batch_lines_total", 90, 'outcome="ok"'
        )
    served = [
        json.loads(text) for text in world.serve.log.read_text().splitlines() if '"audit"' in text
    ]
    used = [one for one in served if one["action"] == "request" and one["tier"] == "batch"]
    assert {one["key"] for one in used} == {"client"}
    assert len(used) >= 100
    assert process.tracebacks() == []


@pytest.mark.exhaustive
async def test_what_waits_is_exported_for_the_service(world: BatchSurroundings) -> None:
    process = await world.batch(BATCH_CONCURRENCY="4").start().ready()
    place = (f'service_namespace="{NAMESPACE}"', f'inference_service="{MODEL}"')
    async with process.client(world.keys["client"]) as client:
        batch_id = await submit(client, [line(number, seconds=0.5) for number in range(40)])
        await until(process, "no backlog", "fleetkeeper_batch_remaining_lines", 20, *place)
        found = await process.metrics()
        series = {
            name.partition("{")[0]: value for name, value in found.items() if place[0] in name
        }
        assert series["fleetkeeper_batch_backlog_tokens"] > 0
        assert series["fleetkeeper_batch_required_tokens_per_second"] > 0
        assert 0 < series["fleetkeeper_batch_deadline_timestamp_seconds"] - time.time() <= 86_400
        await client.batches.cancel(batch_id)

        async def gone() -> bool:
            return not any(place[0] in name for name in await process.metrics())

        await process.until(gone, "the backlog of a batch that ends is still there")


async def test_a_process_that_ends_finishes_its_lines_and_another_goes_on(
    world: BatchSurroundings,
) -> None:
    first = await world.batch(BATCH_CONCURRENCY="8").start().ready()
    async with first.client(world.keys["client"]) as client:
        batch_id = await submit(client, [line(number, seconds=0.3) for number in range(60)])
        await until(first, "no line is done", "fleetkeeper_gateway_batch_lines_total", 8)
    assert await first.stop() == 0
    assert first.tracebacks() == []
    second = await world.batch("batch-b").start().ready()
    async with second.client(world.keys["client"]) as client:
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{world.engine.port}/answered") as answer,
        ):
            assert await answer.json() == 60, "no line was sent twice"
        assert numbers(await lines_of(client, batch.output_file_id)) == list(range(60))


@pytest.mark.exhaustive
async def test_lines_wait_while_the_gateway_is_away_and_the_api_server_too(
    world: BatchSurroundings,
) -> None:
    process = await world.batch().start().ready()
    world.serve.kill()
    async with process.client(world.keys["client"]) as client:
        batch_id = await submit(client, [line(number) for number in range(20)])
        await until(
            process,
            "nothing was tried",
            "fleetkeeper_gateway_batch_lines_total",
            1,
            'outcome="refused"',
        )
        assert "lines cannot be sent; they wait" in process.log.read_text()
        await world.serve.start().ready()
        await world.api.stop()
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 20)


@pytest.mark.exhaustive
async def test_it_runs_without_a_cluster_and_with_another_upstream(
    world: BatchSurroundings, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sk-upstream")
    process = world.batch(
        KUBECONFIG="",
        ANONYMOUS="true",
        BATCH_UPSTREAM=f"http://127.0.0.1:{world.engine.port}",
        BATCH_UPSTREAM_KEY_FILE=str(tmp_path / "key"),
    )
    await process.start().ready()
    async with process.client("whatever") as client:
        batch = await ended(client, await submit(client, [line(number) for number in range(10)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 10)
        assert not any("backlog" in name for name in await process.metrics())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"BATCH_UPSTREAM": ""}, "BATCH_UPSTREAM"),
        ({"REDIS_URL": ""}, "REDIS_URL"),
        ({"BATCH_STORE": "ftp://x"}, "BATCH_STORE"),
        ({"KUBECONFIG": "missing.json"}, "missing.json"),
        ({"BATCH_CONCURRENCY": "0"}, "batch_concurrency"),
    ],
)
async def test_what_cannot_work_does_not_start_and_says_why(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    sound = {
        "ANONYMOUS": "false" if "KUBECONFIG" in settings else "true",
        "BATCH_STORE": f"file://{tmp_path}/store",
        "BATCH_UPSTREAM": "http://127.0.0.1:1",
        "REDIS_URL": "redis://127.0.0.1:1/0",
    }
    process = BatchProcess(tmp_path, settings={**sound, **settings}).start()
    assert process.process is not None
    assert await asyncio.to_thread(process.process.wait, 120) in {1, 2}
    assert words in process.tail()
    assert process.tracebacks() == []


@pytest.mark.exhaustive
async def test_a_second_process_on_a_directory_that_is_not_shared_does_not_start(
    world: BatchSurroundings,
) -> None:
    await world.batch(BATCH_STORE_SHARED="false").start().ready()
    second = world.batch("batch-b", BATCH_STORE_SHARED="false").start()
    assert second.process is not None
    assert await asyncio.to_thread(second.process.wait, 120) == 1
    assert "another process uses" in second.tail()


async def test_an_active_batch_of_the_form_before_chunks_begins_again(
    world: BatchSurroundings,
) -> None:
    """Its results so far are not read; they go an hour after its end."""
    now = int(time.time())
    data = jsonl(line(number) for number in range(20))
    file = FileRecord(f"file-{1:032x}", "client", "in.jsonl", "batch", len(data), now)
    record = BatchRecord(f"batch_{1:032x}", "client", file.id, ENDPOINT, "24h", now, now + 86_400)
    old = {
        "validated": {"lines": 20, "model": MODEL, "tokens": 100, "at": now, "mistakes": []},
        "index": "0" * 32,
    }
    segment = f"keys/client/segments/{record.id}/{'0' * 16}-0000000"
    settings = BatchSettings(batch_store=f"file://{world.store}", batch_store_shared=True)
    with closing(create_storage(settings)) as storage:
        path = storage.files.data_path("client", file.id)
        await storage.objects.create(path, data)
        await storage.files.put(file)
        await storage.batches.create(record)
        folder = f"keys/client/batches/{record.id}"
        await storage.objects.create(f"{folder}/validated.json", json.dumps(old).encode())
        await storage.objects.create(f"{folder}/lines-{'0' * 32}", b"")
        await storage.objects.create(segment, b"FKS1")
        process = await world.batch().start().ready()
        async with process.client(world.keys["client"]) as client:
            batch = await ended(client, record.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 20)
            assert numbers(await lines_of(client, batch.output_file_id)) == list(range(20))
        assert await storage.objects.read(segment) is not None
        await storage.sweeper.sweep(now + 7200)
        assert await storage.objects.read(segment) is None
    assert process.tracebacks() == []
