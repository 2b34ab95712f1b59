"""The largest inputs of each call, and how long they keep the event loop of all keys at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from fleetkeeper_gateway.batch.api import documents
from fleetkeeper_gateway.batch.api.documents import file_document, list_document
from fleetkeeper_gateway.batch.api.status import Facts, batch_document
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Mistake,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.model import Final as End
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import create_storage
from fleetkeeper_gateway.batch.storage.batches import BATCH, END
from fleetkeeper_gateway.batch.storage.files import FILE
from tests.support.batch.batch_api import CHAT, ApiWorld, RawClient
from tests.support.processor_units import LONGEST, longest_turn

FILES: Final = 10_000
"""The default quota of files of a key, and the most of one list."""
BATCHES: Final = 10_000
"""The default quota of batches of a key."""

pytestmark = pytest.mark.slow


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ApiWorld]:
    """An API over a directory, whose objects tests write themselves."""
    world = ApiWorld(BatchSettings(batch_store=f"file://{tmp_path}/store"))
    storage = create_storage(world.settings, wall=lambda: world.now)
    world.set(objects=storage.objects, files=storage.files, batches=storage.batches)
    async with world.running():
        yield world
    storage.close()


def put(tmp_path: Path, path: str, content: bytes) -> None:
    file = tmp_path / "store" / path
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


async def get(raw: RawClient, path: str) -> bytes:
    """Send a request. Return the body of its answer, which is not parsed."""
    await raw.ask("GET", path)
    head = await raw.head()
    body = await raw.content(head)
    assert head.startswith("http/1.1 200 ")
    return body


async def test_a_list_of_all_files(world: ApiWorld, tmp_path: Path) -> None:
    for number in range(FILES):
        record = FileRecord(
            f"file-{number:032x}", "one", "in.jsonl", "batch", 5, int(world.now) - number
        )
        put(tmp_path, f"keys/one/files/{record.id}/file.json", FILE.encode(record))
    async with world.connected() as raw:
        listed = json.loads(await get(raw, "/v1/files"))
        assert len(listed["data"]) == FILES
        assert await longest_turn(lambda: get(raw, "/v1/files")) < LONGEST


@pytest.mark.parametrize("limit", [1, 100])
async def test_a_page_of_many_batches(world: ApiWorld, tmp_path: Path, limit: int) -> None:
    for number in range(BATCHES):
        record = BatchRecord(
            f"batch_{number:032x}",
            "one",
            "file-" + "0" * 32,
            CHAT,
            "24h",
            int(world.now),
            int(world.now),
            {f"{pair:064}": "x" * 512 for pair in range(16)} if number % 100 == 0 else {},
        )
        root = f"keys/one/batches/{record.id}"
        put(tmp_path, f"{root}/batch.json", BATCH.encode(record))
        final = END.encode(End(Status.COMPLETED, int(world.now), Counts(1, 1)))
        (tmp_path / "store" / root / "final.json").write_bytes(final)
    path = f"/v1/batches?limit={limit}"
    async with world.connected() as raw:
        assert len(json.loads(await get(raw, path))["data"]) == limit
        assert await longest_turn(lambda: get(raw, path)) < LONGEST


def largest_batch(number: int, now: int) -> tuple[BatchRecord, Validated]:
    """Return a batch with the most metadata and mistakes. A character takes twelve bytes of JSON."""
    metadata = {f"{pair:x}" + "😀" * 63: "😀" * 512 for pair in range(16)}
    record = BatchRecord(
        f"batch_{number:032x}", "one", "file-" + "0" * 32, CHAT, "24h", now, now, metadata
    )
    mistake = Mistake("invalid_value", "😀" * 100, 50_000, "body.messages")
    return record, Validated(1, "", 0, now, (mistake,) * 100)


async def test_a_page_of_the_largest_batches(world: ApiWorld) -> None:
    for number in range(100):
        record, validated = largest_batch(number, int(world.now))
        await world.parts.batches.create(record)
        await world.parts.batches.put_validated(record, validated, ())
    path = "/v1/batches?limit=100"
    async with world.connected() as raw:
        assert len(json.loads(await get(raw, path))["data"]) == 100
        assert await longest_turn(lambda: get(raw, path)) < LONGEST


@pytest.mark.parametrize("shown", ["files", "batches"])
async def test_a_turn_encodes_few_bytes_of_a_list(
    monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    document = batch_document(Facts(*largest_batch(0, 0)), 0)
    if shown == "files":
        record = FileRecord("file-" + "0" * 32, "one", "😀" * 255, "batch", 5, 0)
        document = file_document(record, 0)
    turns, dumps = [0], json.dumps
    largest = len(dumps(document))

    def counted(value: object) -> str:
        text = dumps(value)
        turns[-1] += len(text)
        return text

    async def other() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(json, "dumps", counted)
    probing = asyncio.create_task(other())
    pieces = await list_document((document for _ in range(100)), has_more=False)
    probing.cancel()
    assert json.loads(b"".join(pieces))["data"] == [document] * 100
    assert max(turns) < documents.PIECE_BYTES + largest


@pytest.mark.parametrize(
    "fill",
    ["{}", "[]", "1", '"a"', '{"a":[]}'],
    ids=["objects", "lists", "numbers", "texts", "mixed"],
)
async def test_the_body_of_a_new_batch(world: ApiWorld, fill: str) -> None:
    body = f'{{"metadata":[{",".join([fill] * (65_000 // (len(fill) + 1)))}]}}'.encode()

    async def create(raw: RawClient) -> None:
        await raw.ask("POST", "/v1/batches", body)
        status, answer = await raw.answer()
        assert status == 400, answer

    async with world.connected() as raw:
        assert await longest_turn(lambda: create(raw)) < LONGEST
