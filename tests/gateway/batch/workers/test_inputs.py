"""Lines are read block by block."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetkeeper_gateway.batch.interfaces import ObjectMissing, StorageError
from fleetkeeper_gateway.batch.model import LineRef
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.workers import inputs as module
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from tests.gateway.batch.workers.world import batch_record, input_text, line_refs, put_file


class CountedObjects:
    """Objects of a store that count reads, and fail while a test says so."""

    def __init__(self, storage: Storage) -> None:
        self._objects = storage.objects
        self.reads: list[tuple[int, int]] = []
        self.failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        await asyncio.sleep(0)
        if self.failing:
            raise StorageError("the test says so")
        return await self._objects.read_range(path, offset, length)


@pytest.fixture
def objects(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> CountedObjects:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    return CountedObjects(storage)


async def test_every_line_is_found_and_each_block_is_read_once(
    storage: Storage, objects: CountedObjects
) -> None:
    record = batch_record()
    text = input_text(20, padding="x" * 250)
    await put_file(storage, record, text)
    inputs = Inputs(objects, storage.files)
    lines = await asyncio.gather(*(inputs.line(record, ref) for ref in line_refs(text)))
    assert lines == text.splitlines()
    blocks = range(0, len(text), 1000)
    assert sorted(objects.reads) == [(start, min(1000, len(text) - start)) for start in blocks]
    request = await inputs.request(record, line_refs(text)[7])
    assert request.custom_id == "c-7"
    assert b'"number":7' in request.body


async def test_a_long_line_is_read_alone(storage: Storage, objects: CountedObjects) -> None:
    record = batch_record()
    text = input_text(3, padding="x" * 5000)
    await put_file(storage, record, text)
    inputs = Inputs(objects, storage.files)
    refs = line_refs(text)
    assert await inputs.line(record, refs[1]) == text.splitlines()[1]
    assert objects.reads == [(refs[1].offset, refs[1].length)]


async def test_old_blocks_make_room(
    storage: Storage, objects: CountedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BLOCKS", 2)
    record = batch_record()
    text = input_text(20, padding="x" * 250)
    await put_file(storage, record, text)
    inputs = Inputs(objects, storage.files)
    for ref in [*line_refs(text), line_refs(text)[0]]:
        await inputs.line(record, ref)
    assert objects.reads.count((0, 1000)) == 2
    assert len(inputs._blocks) == 2


async def test_a_failure_is_for_those_who_asked_and_not_kept(
    storage: Storage, objects: CountedObjects
) -> None:
    record = batch_record()
    text = input_text(2)
    await put_file(storage, record, text)
    inputs = Inputs(objects, storage.files)
    objects.failing = True
    found = await asyncio.gather(
        *(inputs.line(record, ref) for ref in line_refs(text)), return_exceptions=True
    )
    assert [type(one) for one in found] == [StorageError, StorageError]
    objects.failing = False
    assert await inputs.line(record, line_refs(text)[0]) == text.splitlines()[0]


async def test_who_gives_up_takes_nothing_from_the_others(
    storage: Storage, objects: CountedObjects
) -> None:
    record = batch_record()
    text = input_text(2)
    await put_file(storage, record, text)
    inputs = Inputs(objects, storage.files)
    first, second = (asyncio.create_task(inputs.line(record, ref)) for ref in line_refs(text))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == text.splitlines()[1]
    assert first.cancelled()


async def test_a_file_that_is_gone_is_told_from_a_store_that_fails(storage: Storage) -> None:
    with pytest.raises(ObjectMissing):
        await Inputs(storage.objects, storage.files).line(batch_record(), LineRef(0, 0, 10))


async def test_a_line_beyond_the_end_is_an_error(storage: Storage) -> None:
    record = batch_record()
    text = input_text(1)
    await put_file(storage, record, text)
    with pytest.raises(ObjectMissing, match="ends before line 1"):
        await Inputs(storage.objects, storage.files).line(record, LineRef(0, 10, len(text)))
