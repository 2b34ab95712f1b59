"""Lines are read block by block."""

from __future__ import annotations

import asyncio

import pytest

from fleetkeeper_gateway.batch.interfaces import ObjectMissing, StorageError
from fleetkeeper_gateway.batch.model import LineRef
from fleetkeeper_gateway.batch.workers import inputs as module
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from tests.gateway.batch.workers.memory import (
    MemoryFiles,
    MemoryObjects,
    batch_record,
    input_text,
    line_refs,
)
from tests.support.processor_units import LONGEST, longest_turn

RECORD = batch_record()
PATH = MemoryFiles().data_path(RECORD.key_id, RECORD.input_file)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    return MemoryObjects()


async def test_every_line_is_found_and_each_block_is_read_once(objects: MemoryObjects) -> None:
    text = input_text(20, padding="x" * 250)
    objects.data[PATH] = text
    inputs = Inputs(objects, MemoryFiles())
    lines = await asyncio.gather(*(inputs.line(RECORD, ref) for ref in line_refs(text)))
    assert lines == text.splitlines()
    blocks = range(0, len(text), 1000)
    assert sorted(objects.reads) == [(start, min(1000, len(text) - start)) for start in blocks]
    request = await inputs.request(RECORD, line_refs(text)[7])
    assert request.custom_id == "c-7"
    assert b'"number": 7' in request.body


async def test_a_long_line_is_read_alone(objects: MemoryObjects) -> None:
    text = input_text(3, padding="x" * 5000)
    objects.data[PATH] = text
    inputs = Inputs(objects, MemoryFiles())
    refs = line_refs(text)
    assert await inputs.line(RECORD, refs[1]) == text.splitlines()[1]
    assert objects.reads == [(refs[1].offset, refs[1].length)]


async def test_old_blocks_make_room(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BLOCKS", 2)
    text = input_text(20, padding="x" * 250)
    objects.data[PATH] = text
    inputs = Inputs(objects, MemoryFiles())
    for ref in [*line_refs(text), line_refs(text)[0]]:
        await inputs.line(RECORD, ref)
    assert objects.reads.count((0, 1000)) == 2
    assert len(inputs._blocks._tasks) == 2


async def test_a_failure_is_for_those_who_asked_and_not_kept(objects: MemoryObjects) -> None:
    text = input_text(2)
    objects.data[PATH] = text
    inputs = Inputs(objects, MemoryFiles())
    objects.failing = True
    found = await asyncio.gather(
        *(inputs.line(RECORD, ref) for ref in line_refs(text)), return_exceptions=True
    )
    assert [type(one) for one in found] == [StorageError, StorageError]
    objects.failing = False
    assert await inputs.line(RECORD, line_refs(text)[0]) == text.splitlines()[0]


async def test_who_gives_up_takes_nothing_from_the_others(objects: MemoryObjects) -> None:
    text = input_text(2)
    objects.data[PATH] = text
    inputs = Inputs(objects, MemoryFiles())
    first, second = (asyncio.create_task(inputs.line(RECORD, ref)) for ref in line_refs(text))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == text.splitlines()[1]
    assert first.cancelled()


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_line_that_is_not_there_differs_from_a_store_that_fails(
    objects: MemoryObjects, *, is_gone: bool
) -> None:
    text = input_text(1)
    if not is_gone:
        objects.data[PATH] = text
    with pytest.raises(ObjectMissing, match="is gone" if is_gone else "ends before line 1"):
        await Inputs(objects, MemoryFiles()).line(RECORD, LineRef(0, 10, len(text)))


@pytest.mark.parametrize("text", ["", "\\ud800"], ids=["as usual", "half of a pair"])
async def test_a_long_line_of_many_values_leaves_the_loop_its_turns(text: str) -> None:
    """A tenant writes its lines, and its worker process has those of others."""
    objects = MemoryObjects()
    line = b'{"custom_id": "x", "body": {"a": "%b", "b": [%b{}]}}' % (
        text.encode(),
        b"{}," * 300_000,
    )
    objects.data[PATH] = line
    inputs = Inputs(objects, MemoryFiles())
    ref = LineRef(0, 0, len(line))
    assert (await inputs.request(RECORD, ref)).body in line
    assert await longest_turn(lambda: inputs.request(RECORD, ref)) < LONGEST
