"""Batches as objects: each step happens once, whoever takes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import ObjectMissing
from fleetkeeper_gateway.batch.model import BatchRecord, Mistake, Result, Status
from fleetkeeper_gateway.batch.storage import BrokenObject, Storage, paths, segments
from tests.support.batch_storage import (
    KEY,
    NOW,
    OTHER_KEY,
    a_batch,
    a_final,
    a_validated,
    batch_id,
    lines,
    parts_of,
    paths_in,
    results,
)


async def _stored(storage: Storage, record: BatchRecord) -> dict[str, list[Result]]:
    return {name: list(some) async for name, some in storage.batches.results(record)}


async def test_a_batch_is_found_by_its_key_alone(storage: Storage) -> None:
    record = a_batch(output_expires_after=3600)
    assert await storage.batches.create(record)
    assert not await storage.batches.create(replace(record, endpoint="/v1/embeddings"))
    assert await storage.batches.get(KEY, record.id) == record
    assert await storage.batches.get(OTHER_KEY, record.id) is None
    assert await storage.batches.list(OTHER_KEY) == []


async def test_batches_are_listed_newest_first(storage: Storage) -> None:
    for number in (2, 9, 1):
        await storage.batches.create(a_batch(number))
        await storage.batches.add_segment(a_batch(number), results([0]))
    await storage.batches.create(a_batch(5, key_id=OTHER_KEY))
    found = [one.id for one in await storage.batches.list(KEY)]
    assert found == [batch_id(9), batch_id(2), batch_id(1)]
    assert len(await storage.batches.active()) == 4


async def test_a_batch_is_active_until_its_end_is_kept(storage: Storage) -> None:
    record = a_batch()
    await storage.batches.create(record)
    await storage.batches.put_validated(record, a_validated(2), lines(2))
    await storage.batches.add_segment(record, results([0, 1]))
    assert await storage.batches.active() == [record]
    with pytest.raises(ValueError, match="has not ended"):
        await storage.batches.forget_active(record)
    assert len(await _stored(storage, record)) == 1

    await storage.batches.put_final(record, a_final())
    assert await storage.batches.active() == [record]
    await storage.batches.forget_active(record)
    assert await storage.batches.active() == []
    assert await _stored(storage, record) == {}
    assert await storage.batches.get(KEY, record.id) == record
    root = f"keys/{KEY}/batches/{record.id}"
    names = [f"{root}/{name}.json" for name in ("batch", "final", "validated")]
    assert await paths_in(storage) == names
    with pytest.raises(ObjectMissing, match="has ended"):
        await storage.batches.lines(record)
    await storage.batches.forget_active(record)


async def test_a_marker_without_a_record_is_no_batch(storage: Storage) -> None:
    await storage.objects.create(f"active/{KEY}/{batch_id(1)}", b"")
    await storage.objects.create(f"active/{KEY}/something", b"")
    assert await storage.batches.active() == []
    assert await storage.batches.get(KEY, batch_id(1)) is None


async def test_a_broken_batch_is_reported_and_hides_no_other(storage: Storage) -> None:
    await storage.batches.create(a_batch(1))
    await storage.batches.create(a_batch(2))
    path = f"keys/{KEY}/batches/{batch_id(1)}/batch.json"
    await storage.objects.write(path, parts_of(b'{"id":'))
    with capture_logs() as logs:
        assert await storage.batches.active() == [a_batch(2)]
        assert await storage.batches.list(KEY) == [a_batch(2)]
    assert [one["path"] for one in logs] == [path, path]
    with pytest.raises(BrokenObject, match=path):
        await storage.batches.get(KEY, batch_id(1))


async def test_the_first_validation_counts_with_its_index(storage: Storage) -> None:
    """An older version may see other lines in the same file."""
    record = a_batch()
    await storage.batches.create(record)
    assert await storage.batches.validated(record) is None
    with pytest.raises(ObjectMissing, match="not validated"):
        await storage.batches.lines(record)
    await storage.batches.put_validated(record, a_validated(3), lines(3))
    await storage.batches.put_validated(record, a_validated(2), lines(2))
    assert await storage.batches.validated(record) == a_validated(3)
    assert await storage.batches.lines(record) == lines(3)
    # The other index goes, too.
    await storage.batches.put_final(record, a_final())
    await storage.batches.forget_active(record)
    assert not [path for path in await paths_in(storage) if "/lines-" in path]


async def test_a_file_with_mistakes_has_no_lines(storage: Storage) -> None:
    record = a_batch()
    mistakes = (Mistake("invalid_json", "line 3 is no JSON", 3), Mistake("empty", "no lines"))
    validated = a_validated(0, model="", mistakes=mistakes)
    await storage.batches.put_validated(record, validated, [])
    assert await storage.batches.validated(record) == validated
    assert await storage.batches.lines(record) == ()


async def test_an_index_that_is_damaged_is_not_used(local: Storage) -> None:
    record = a_batch()
    await local.batches.put_validated(record, a_validated(3), lines(3))
    (path,) = [path for path in await paths_in(local) if "/lines-" in path]
    content = await local.objects.read(path)
    assert content is not None
    await local.objects.write(path, parts_of(content[:12], b"\x07", content[13:]))
    with pytest.raises(BrokenObject, match=path):
        await local.batches.lines(record)


async def test_50_000_lines_are_kept(local: Storage) -> None:
    record = a_batch()
    await local.batches.put_validated(record, a_validated(50_000), lines(50_000))
    assert await local.batches.lines(record) == lines(50_000)
    (index,) = [one for one in await local.objects.list("keys/") if "/lines-" in one.path]
    assert index.bytes == 600_000


async def test_a_cancellation_keeps_its_first_time(storage: Storage) -> None:
    record = a_batch()
    assert await storage.batches.cancelled_at(record) is None
    await storage.batches.cancel(record, NOW)
    await storage.batches.cancel(record, NOW + 5)
    assert await storage.batches.cancelled_at(record) == NOW


async def test_of_two_ends_the_first_counts_for_both(storage: Storage) -> None:
    record = a_batch()
    assert await storage.batches.final(record) is None
    ends = [a_final(NOW + number, status=Status.EXPIRED) for number in range(6)]
    kept = await asyncio.gather(*(storage.batches.put_final(record, end) for end in ends))
    assert len(set(kept)) == 1
    assert kept[0] in ends
    assert await storage.batches.final(record) == kept[0]


async def test_results_are_read_as_they_were_written(storage: Storage) -> None:
    record = a_batch()
    written = {}
    # More than are read at once, and not in the order of their fences.
    for fence in (900, 5, *range(20, 40), 7):
        some = results([fence, 1, 3], fence)
        written[await storage.batches.add_segment(record, some)] = some
    await storage.batches.add_segment(a_batch(2), results([1]))
    found = await _stored(storage, record)
    assert found == written
    fences = [some[0].fence for some in found.values()]
    assert fences == sorted(fences)
    assert all(len(name) <= 24 for name in found)


async def test_segments_of_an_earlier_version_are_read_in_the_same_order(local: Storage) -> None:
    """Its names have fences of 12 digits. A batch that was begun before an upgrade has both."""
    record, late = a_batch(), 300 << 40
    for fence in (late, 1 << 40):
        await local.batches.add_segment(record, results([1], fence))
    for fence in (2 << 40, 5):
        path = paths.segment(KEY, record.id, f"{fence:012x}-0123456789a")
        assert await local.objects.create(path, segments.encode(results([1], fence)))
    found = await _stored(local, record)
    assert [some[0].fence for some in found.values()] == [5, 1 << 40, 2 << 40, late]


async def test_a_torn_segment_is_logged_and_left_out(storage: Storage) -> None:
    record = a_batch()
    torn = await storage.batches.add_segment(record, results([1], fence=1))
    whole = await storage.batches.add_segment(record, results([1], fence=2))
    path = f"keys/{KEY}/segments/{record.id}/{torn}"
    content = await storage.objects.read(path)
    assert content is not None
    await storage.objects.write(path, parts_of(content[:-9]))
    with capture_logs() as logs:
        assert list(await _stored(storage, record)) == [whole]
    assert [one["path"] for one in logs] == [path]


async def test_a_segment_has_results(local: Storage) -> None:
    with pytest.raises(ValueError, match="at least one"):
        await local.batches.add_segment(a_batch(), [])
