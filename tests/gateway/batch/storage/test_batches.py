"""Batches as objects: each step happens once, whoever takes it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import ObjectMissing
from fleetkeeper_gateway.batch.model import LineRef, Mistake, Status
from fleetkeeper_gateway.batch.storage import BrokenObject, Storage
from tests.support.batch.batch_storage import (
    KEY,
    NOW,
    OTHER_KEY,
    a_batch,
    a_file,
    a_final,
    a_validated,
    batch_id,
    file_id,
    lines,
    parts_of,
    paths_in,
    put_file,
    results,
)


async def test_a_batch_is_found_by_its_key_alone(storage: Storage) -> None:
    record = a_batch(output_expires_after=3600)
    assert await storage.batches.create(record)
    assert not await storage.batches.create(replace(record, endpoint="/v1/embeddings"))
    assert await storage.batches.get(KEY, record.id) == record
    assert await storage.batches.get(OTHER_KEY, record.id) is None
    assert await storage.batches.ids(OTHER_KEY) == []


async def _ended(storage: Storage, directory: Path, number: int, key_id: str = KEY) -> None:
    """Create a batch that ended. Its number is also the age of its objects."""
    record = a_batch(number, key_id=key_id)
    await storage.batches.create(record)
    await storage.batches.put_validated(record, a_validated(1), lines(1))
    await storage.batches.put_final(record, a_final())
    await storage.batches.forget_active(record)
    for path in (directory / "keys" / key_id / "batches" / record.id).iterdir():
        os.utime(path, (NOW + number, NOW + number))


async def test_batches_are_listed_newest_first_without_reading_their_records(
    local: Storage, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 9, 1):
        await _ended(local, directory, number)
        await local.batches.log(a_batch(number), 0, range(2)).append(results([0]))
    await local.batches.create(a_batch(5, key_id=OTHER_KEY))
    assert len(await local.batches.active()) == 1
    read: list[str] = []

    async def noted(path: str) -> bytes | None:
        read.append(path)
        return None

    monkeypatch.setattr(local.objects, "read", noted)
    assert await local.batches.ids(KEY) == [batch_id(9), batch_id(2), batch_id(1)]
    assert read == []


async def test_the_active_batches_of_a_key_are_found_without_those_of_others(
    storage: Storage,
) -> None:
    records = [a_batch(1), a_batch(2, key_id=OTHER_KEY), a_batch(3, key_id=f"{KEY}.x")]
    for record in records:
        await storage.batches.create(record)
    await storage.objects.write(
        f"keys/{OTHER_KEY}/batches/{batch_id(2)}/batch.json", parts_of(b"broken")
    )
    with capture_logs() as logs:
        assert await storage.batches.active_ids(KEY) == [records[0].id]
    assert logs == []


async def test_the_batches_that_ended_first_make_room(local: Storage, directory: Path) -> None:
    await local.batches.create(a_batch(1))
    for number in (4, 2, 3):
        await _ended(local, directory, number)
    await _ended(local, directory, 1, OTHER_KEY)
    await put_file(local, a_file(2))
    assert await local.batches.make_room(KEY, 10) == 6
    assert await local.batches.make_room(KEY, 5) == 1
    assert len(await local.batches.ids(KEY)) == 4
    # One more goes than must, so that one may come.
    assert await local.batches.make_room(KEY, 4) == 1
    assert set(await local.batches.ids(KEY)) == {batch_id(number) for number in (1, 3, 4)}
    assert [one for one in await paths_in(local) if batch_id(2) in one] == []
    assert await local.files.get(KEY, file_id(2)) == a_file(2)
    # Those that have not ended stay, and those that are being ended.
    await local.batches.put_final(a_batch(1), a_final())
    assert await local.batches.make_room(KEY, 1) == 0
    assert await local.batches.ids(KEY) == [batch_id(1)]
    assert await local.batches.make_room(KEY, 1) == 0
    assert await local.batches.ids(OTHER_KEY) == [batch_id(1)]


async def test_a_batch_is_active_until_its_end_is_kept(storage: Storage) -> None:
    record = a_batch()
    await storage.batches.create(record)
    await storage.batches.put_validated(record, a_validated(2), lines(2))
    await storage.batches.log(record, 0, range(2)).append(results([0, 1]), close=True)
    assert await storage.batches.active() == [record]
    with pytest.raises(ValueError, match="has not ended"):
        await storage.batches.forget_active(record)
    assert len(await paths_in(storage, f"keys/{KEY}/logs/")) == 1

    await storage.batches.put_final(record, a_final())
    assert await storage.batches.active() == [record]
    await storage.batches.forget_active(record)
    assert await storage.batches.active() == []
    assert await storage.batches.get(KEY, record.id) == record
    root = f"keys/{KEY}/batches/{record.id}"
    names = [f"{root}/{name}.json" for name in ("batch", "chunks", "final")]
    assert await paths_in(storage) == names
    with pytest.raises(ObjectMissing, match="has ended"):
        await storage.batches.index(record)
    await storage.batches.forget_active(record)


async def test_a_batch_without_a_sound_record_hides_no_other(storage: Storage) -> None:
    await storage.objects.create(f"active/{KEY}/{batch_id(3)}", b"")
    await storage.objects.create(f"active/{KEY}/something", b"")
    await storage.batches.create(a_batch(1))
    await storage.batches.create(a_batch(2))
    path = f"keys/{KEY}/batches/{batch_id(1)}/batch.json"
    await storage.objects.write(path, parts_of(b'{"id":'))
    with capture_logs() as logs:
        assert await storage.batches.active() == [a_batch(2)]
        assert await storage.batches.several(KEY, [batch_id(n) for n in (3, 1, 2)]) == [a_batch(2)]
    assert [one["path"] for one in logs] == [f"active/{KEY}/something", path, path]
    assert await storage.batches.get(KEY, batch_id(3)) is None
    with pytest.raises(BrokenObject, match=path):
        await storage.batches.get(KEY, batch_id(1))


async def test_the_first_validation_counts_with_its_index(storage: Storage) -> None:
    """An older version may see other lines in the same file."""
    record = a_batch()
    await storage.batches.create(record)
    assert await storage.batches.validated(record) is None
    with pytest.raises(ObjectMissing, match="not validated"):
        await storage.batches.index(record)
    await storage.batches.put_validated(record, a_validated(3), lines(3))
    await storage.batches.put_validated(record, a_validated(2), lines(2))
    assert await storage.batches.validated(record) == a_validated(3)
    index = await storage.batches.index(record)
    assert (list(index), index.chunks) == (lines(3), (range(3),))
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
    index = await storage.batches.index(record)
    assert (len(index), index.chunks) == (0, ())
    assert (await storage.batches.progress(record, validated)).open == frozenset()


async def test_an_index_that_is_damaged_is_not_used(local: Storage) -> None:
    record = a_batch()
    await local.batches.put_validated(record, a_validated(300), lines(300))
    (path,) = [path for path in await paths_in(local) if "/lines-" in path]
    content = await local.objects.read(path)
    assert content is not None
    await local.objects.write(path, parts_of(content[:12], b"\x07", content[13:]))
    with pytest.raises(BrokenObject, match=path):
        await local.batches.index(record)
    # The chunks are known, so it can be made again from the input file, or without it.
    blank = [LineRef(number, 0, 0) for number in range(300)]
    for found in (lines(300), blank):
        index = await local.batches.index(record, found)
        assert (list(index), index.chunks) == (found, (range(256), range(256, 300)))
    with pytest.raises(BrokenObject, match="200 lines"):
        await local.batches.index(record, lines(200))
    # What was found does not count for others.
    with pytest.raises(BrokenObject, match=path):
        await local.batches.index(record)


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
