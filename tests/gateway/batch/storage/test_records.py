"""Records that are kept in memory: clients decide their size, not how much memory they take."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest

from fleetkeeper_gateway.batch.model import Mistake
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.batches import StoredBatches
from fleetkeeper_gateway.batch.storage.records import KEPT_BYTES, Records
from tests.support.batch.batch_memory import MemoryObjects
from tests.support.batch.batch_storage import a_batch, a_validated

MIB = 1024 * 1024


class CountedObjects(MemoryObjects):
    """Objects whose reads are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    async def read(self, path: str) -> bytes | None:
        self.reads[path] += 1
        return await super().read(path)


@pytest.mark.parametrize("characters", [70, 300])
async def test_long_validations_take_bounded_memory_and_small_ones_are_kept(
    characters: int,
) -> None:
    """100 mistakes of 70 characters are kept, up to the bound; those of 300 are not."""
    objects = CountedObjects()
    records = Records(objects)
    batches = StoredBatches(objects, records)
    small, first, *others = map(a_batch, range(6_000))
    await batches.put_validated(small, a_validated(1), ())
    mistakes = tuple(Mistake("invalid", "x" * characters, line) for line in range(100))
    await batches.put_validated(first, a_validated(100, mistakes=mistakes), ())
    content = objects.kept[paths.batch_object(first.key_id, first.id, paths.VALIDATED)]
    for one in others:
        objects.kept[paths.batch_object(one.key_id, one.id, paths.VALIDATED)] = content
    tracemalloc.start()
    try:
        for one in others:
            await batches.validated(one)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(
        f"\n{len(content)} bytes each, {records._bytes / MIB:.1f} MiB, {taken / MIB:.1f} MiB taken"
    )
    assert records._bytes <= KEPT_BYTES
    # Objects of Python take more than their content.
    assert taken < 2 * KEPT_BYTES
    objects.reads.clear()
    for _ in range(3):
        await batches.validated(small)
    assert objects.reads.total() == 1
    # What is deleted makes room.
    await records.delete(list(objects.kept))
    assert (records._bytes, records._kept) == (0, {})
