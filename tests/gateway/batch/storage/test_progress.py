"""Progress: from one list and the heads of parts, and never back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import Attempt, BatchRecord, Counts, Progress, Result, Trouble
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.storage import records as records_module
from fleetkeeper_gateway.batch.storage.part import HEAD_BYTES
from tests.support.batch.batch_storage import (
    KEY,
    a_batch,
    a_final,
    a_validated,
    batch_id,
    lines,
    parts_of,
    results,
)

LINES = 600
CHUNKS = (range(256), range(256, 512), range(512, 600))


@pytest.fixture
def record() -> BatchRecord:
    return a_batch()


async def put(storage: Storage, record: BatchRecord) -> None:
    await storage.batches.put_validated(record, a_validated(LINES), lines(LINES))


async def now(storage: Storage, record: BatchRecord) -> Progress:
    return await storage.batches.progress(record, a_validated(LINES))


async def append(
    storage: Storage, record: BatchRecord, chunk: int, some: Any, **close: Any
) -> None:
    log = storage.batches.log(record, chunk, CHUNKS[chunk])
    await log.append(some, **close)


def path(chunk: int, number: int) -> str:
    return f"keys/{KEY}/logs/{batch_id(1)}/{chunk:05}-{number:04}"


async def test_progress_is_what_the_parts_have(storage: Storage, record: BatchRecord) -> None:
    await put(storage, record)
    assert await now(storage, record) == Progress(Counts(LINES), frozenset({0, 1, 2}))
    await append(storage, record, 0, results(range(9)))
    await append(storage, record, 0, results(range(9, 12)))
    await append(storage, record, 1, (), attempts=[Attempt(300, Trouble.FAILED)])
    # Lines that did not run count as neither.
    ended = [Result(line, ok=False, text=b"{}", ran=False) for line in CHUNKS[2][1:]]
    await append(storage, record, 2, [*results([512]), *ended], close=True)
    assert await now(storage, record) == Progress(Counts(LINES, 9, 4), frozenset({0, 1}))
    await put(storage, a_batch(2))
    assert (await now(storage, a_batch(2))).counts == Counts(LINES)


async def test_heads_are_read_once(
    local: Storage, record: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(local, record)
    reads: Counter[str] = Counter()
    read_range = local.objects.read_range

    async def counted(name: str, offset: int, length: int) -> bytes:
        reads[name] += 1
        if reads.total() == 1:
            raise StorageError("no answer")
        assert (offset, length) == (0, HEAD_BYTES)
        return await read_range(name, offset, length)

    monkeypatch.setattr(local.objects, "read_range", counted)
    await append(local, record, 0, results([0]))
    with pytest.raises(StorageError, match="no answer"):
        await now(local, record)
    reads.clear()
    reads["failed"] = 1
    for number in range(1, 3):
        await append(local, record, 0, results([number]))
        assert (await now(local, record)).counts == Counts(LINES, number, 1)
    assert reads == {"failed": 1, **{path(0, number): 1 for number in range(3)}}
    records = local.batches._records
    size = records._bytes
    monkeypatch.setattr(records_module, "KEPT_BYTES", size)
    await append(local, record, 1, results([256]))
    for _ in range(2):
        assert (await now(local, record)).counts == Counts(LINES, 3, 1)
        assert 0 < records._bytes <= size, "memory is bounded"


async def test_a_damaged_part_counts_nothing(storage: Storage, record: BatchRecord) -> None:
    await put(storage, record)
    for number in range(4):
        await append(storage, record, 0, results([3 * number + 1]))
    await append(storage, record, 2, results(CHUNKS[2]), close=True)
    await storage.objects.create(path(0, 1) + ".damaged", b"")
    for name, cut in ((path(0, 2), 1), (path(2, 0), 50)):
        content = await storage.objects.read(name)
        assert content is not None
        await storage.objects.write(name, parts_of(content[:-cut]))
    await storage.objects.write(path(1, 0), parts_of(b""))
    assert await now(storage, record) == Progress(Counts(LINES, 2, 0), frozenset({0, 1, 2}))
    # As who reads the log finds it.
    log = storage.batches.log(record, 0, CHUNKS[0])
    await log.read()
    assert set(log.done) == {1, 10}
    assert (await now(storage, record)).counts == Counts(LINES, 2, 0)


async def test_parts_behind_a_gap_or_the_end_do_not_count(
    local: Storage, record: BatchRecord
) -> None:
    """As who reads the log finds it: the store lost what was between."""
    await put(local, record)
    for line in (1, 2, 4):
        await append(local, record, 0, results([line]))
    await local.objects.delete([path(0, 1)])
    for name in ("note", "00000-0000.copy"):
        await local.objects.create(f"keys/{KEY}/logs/{batch_id(1)}/{name}", b"of a person")
    assert (await now(local, record)).counts == Counts(LINES, 1, 0)
    log = local.batches.log(record, 0, CHUNKS[0])
    await log.read()
    assert set(log.done) == {1}


async def test_progress_does_not_go_back_at_the_end(
    storage: Storage, record: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs of a batch that has ended are deleted, maybe between the list and the reads."""
    await put(storage, record)
    await append(storage, record, 0, results(range(9)))
    listed = await storage.objects.list(f"keys/{KEY}/logs/{record.id}/")

    async def earlier(*_: Any) -> Any:
        return listed

    final = a_final(counts=Counts(LINES, 590, 10))
    await storage.batches.put_final(record, final)
    await storage.batches.forget_active(record)
    for _ in range(2):
        assert await now(storage, record) == Progress(final.counts, frozenset())
        monkeypatch.setattr(storage.objects, "list", earlier)
