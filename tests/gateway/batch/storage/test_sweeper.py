"""What has expired goes, what an interrupted write left goes, and what is needed stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.storage import Storage, paths
from fleetkeeper_gateway.batch.storage.sweeper import Swept
from tests.support.batch.batch_storage import (
    DAY,
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
from tests.support.services.bucket_server import BucketServer, Fault

HOUR = 3600
RETENTION = 30 * DAY


async def put_results(storage: Storage, record: BatchRecord) -> None:
    """Write a part of the log of the first chunk."""
    await storage.batches.log(record, 0, range(2)).append(results([0]))


async def _end(storage: Storage, number: int, at: int) -> None:
    record = a_batch(number)
    await storage.batches.put_final(record, a_final(at))
    await storage.batches.forget_active(record)


async def test_a_fresh_store_loses_nothing(storage: Storage) -> None:
    await put_file(storage, a_file(1))
    await storage.objects.write(storage.files.data_path(KEY, file_id(2)), parts_of(b"x"))
    for number in (1, 2):
        record = a_batch(number)
        await storage.batches.create(record)
        await storage.batches.put_validated(record, a_validated(2), lines(2))
        await put_results(storage, record)
    await storage.batches.put_final(a_batch(2), a_final())
    await storage.objects.create(f"active/{KEY}/{batch_id(3)}", b"")
    before = await paths_in(storage), await paths_in(storage, "active/")
    assert await storage.sweeper.sweep(NOW) == Swept()
    assert (await paths_in(storage), await paths_in(storage, "active/")) == before


@pytest.mark.parametrize(("expires", "lives_s"), [(NOW + 100, 100), (None, RETENTION)])
async def test_files_go_an_hour_after_they_expired(
    storage: Storage, expires: int | None, lives_s: int
) -> None:
    await put_file(storage, a_file(1, created=NOW, expires=expires))
    await put_file(storage, a_file(2, created=NOW + lives_s, key_id=OTHER_KEY))
    assert (await storage.sweeper.sweep(NOW + lives_s + HOUR - 1)).files == 0
    assert (await storage.files.usage(KEY)).files == 1
    assert (await storage.sweeper.sweep(NOW + lives_s + HOUR)).files == 1
    assert (await storage.files.usage(KEY)).files == 0
    assert [one.split("/")[1] for one in await paths_in(storage)] == [OTHER_KEY] * 2


async def test_the_input_of_an_active_batch_stays(storage: Storage) -> None:
    for number in (1, 2):
        await put_file(storage, a_file(number, created=NOW, expires=NOW + 1))
    await storage.batches.create(a_batch(1))
    assert (await storage.sweeper.sweep(NOW + DAY)).files == 1
    assert await storage.objects.read(storage.files.data_path(KEY, file_id(1))) == b"xxxxx"
    await _end(storage, 1, NOW + DAY)
    assert (await storage.sweeper.sweep(NOW + DAY)).files == 1
    assert await storage.objects.read(storage.files.data_path(KEY, file_id(1))) is None


@pytest.mark.parametrize("content", [None, b"{"])
async def test_files_stay_while_a_batch_cannot_be_read(
    storage: Storage, content: bytes | None
) -> None:
    """It is being created, or it is broken: nobody can tell which file it needs."""
    await put_file(storage, a_file(1, expires=NOW + 1))
    await storage.objects.create(f"active/{KEY}/{batch_id(1)}", b"")
    if content is not None:
        await storage.objects.create(f"keys/{KEY}/batches/{batch_id(1)}/batch.json", content)
    assert (await storage.sweeper.sweep(NOW + DAY)).files == 0
    await storage.objects.delete([f"active/{KEY}/{batch_id(1)}"])
    assert (await storage.sweeper.sweep(NOW + DAY)).files == 1


async def test_ended_batches_go_after_the_retention(storage: Storage) -> None:
    for number in (1, 2, 3):
        await storage.batches.create(a_batch(number))
        await storage.batches.put_validated(a_batch(number), a_validated(1), lines(1))
        await storage.batches.cancel(a_batch(number), NOW)
        await put_results(storage, a_batch(number))
    await _end(storage, 1, NOW)
    await _end(storage, 2, NOW + 10)
    assert (await storage.sweeper.sweep(NOW + RETENTION - 1)).batches == 0
    assert (await storage.sweeper.sweep(NOW + RETENTION)).batches == 1
    assert await storage.batches.ids(KEY) == [batch_id(3), batch_id(2)]
    assert await storage.batches.get(KEY, batch_id(1)) is None
    # One that has not ended stays, however old.
    assert (await storage.sweeper.sweep(NOW + 10 * RETENTION)).batches == 1
    assert await storage.batches.active() == [a_batch(3)]
    assert len(await paths_in(storage, f"keys/{KEY}/logs/")) == 1


async def test_orphans_go_once_nobody_can_be_writing_any_more(storage: Storage) -> None:
    """The times are those of the store, so they are now."""
    now = time.time()
    data = storage.files.data_path(KEY, file_id(1))
    marker = f"active/{KEY}/{batch_id(1)}"
    index = f"keys/{KEY}/batches/{batch_id(2)}/validated.json"
    await storage.objects.write(data, parts_of(b"x"))
    await storage.objects.create(marker, b"")
    await storage.objects.create(index, b"{}")
    await put_results(storage, a_batch(3))
    assert await storage.sweeper.sweep(now + HOUR - 60) == Swept()
    assert await storage.sweeper.sweep(now + HOUR + 60) == Swept(orphans=1)
    assert await storage.objects.list("active/") == []
    assert await storage.sweeper.sweep(now + DAY - 60) == Swept()
    assert await storage.sweeper.sweep(now + DAY + 60) == Swept(orphans=3)
    assert await paths_in(storage) == []


async def test_a_batch_that_lost_its_marker_gets_it_back(storage: Storage) -> None:
    record = a_batch(1)
    await storage.batches.create(record)
    await storage.objects.delete([f"active/{KEY}/{record.id}"])
    assert await storage.batches.active() == []
    await storage.sweeper.sweep(NOW)
    assert await storage.batches.active() == [record]


async def test_results_that_came_after_the_end_go(storage: Storage) -> None:
    at = int(time.time())
    await storage.batches.create(a_batch(1))
    await _end(storage, 1, at)
    await put_results(storage, a_batch(1))
    path = f"keys/{KEY}/logs/{batch_id(1)}/00000-0000.damaged"
    await storage.objects.create(path, b"")
    assert await storage.sweeper.sweep(at + HOUR - 60) == Swept()
    assert await storage.sweeper.sweep(at + HOUR + 60) == Swept(orphans=2)
    assert await paths_in(storage, f"keys/{KEY}/logs/") == []
    assert await storage.batches.ids(KEY) == [batch_id(1)]


async def test_what_is_broken_stays_and_stops_nothing(storage: Storage) -> None:
    await storage.objects.create(f"keys/{KEY}/files/{file_id(1)}/file.json", b"{")
    await put_file(storage, a_file(2, expires=NOW + 1))
    await storage.batches.create(a_batch(1))
    final = f"keys/{KEY}/batches/{batch_id(1)}/final.json"
    await storage.objects.create(final, b"{}")
    await storage.objects.delete([f"active/{KEY}/{batch_id(1)}"])
    await storage.objects.create("keys/NO-KEY/files/x", b"")
    others = [f"active/{KEY}/note", f"keys/{KEY}/files/note", f"keys/{KEY}/batches/note"]
    for other in others:
        await storage.objects.create(other, b"of a person")
    with capture_logs() as logs:
        swept = await storage.sweeper.sweep(NOW + 10 * RETENTION)
    assert (swept.files, swept.batches, swept.failed) == (1, 0, 0)
    assert {final, *others} <= {*await paths_in(storage), *await paths_in(storage, "active/")}
    assert final in str(logs)
    assert "NO-KEY" in str(logs)


async def test_a_key_that_cannot_be_swept_does_not_stop_the_others(
    remote: Callable[[float], Storage], bucket: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = remote(120.0)
    for key_id in (KEY, OTHER_KEY):
        await put_file(storage, a_file(1, key_id=key_id, expires=NOW + 1))
    bucket.fail("GET", Fault.FORBIDDEN, part=f"{KEY}/files", times=1000)
    assert await storage.sweeper.sweep(NOW + DAY) == Swept(files=1, failed=1)
    bucket.heal()

    def defective(_: object) -> None:
        raise ValueError("of one key's data")

    with monkeypatch.context() as patch:
        patch.setattr(paths, "by_owner", defective)
        assert await storage.sweeper.sweep(NOW + DAY) == Swept(failed=1)
    assert await storage.sweeper.sweep(NOW + DAY) == Swept(files=1)


async def test_files_of_killed_writers_go(local: Storage, directory: Path) -> None:
    for name, age_s in (("old", DAY + 60), ("fresh", HOUR)):
        path = directory / "staging" / name
        path.write_bytes(b"half")
        os.utime(path, (NOW - age_s, NOW - age_s))
    assert await local.sweeper.sweep(NOW) == Swept(orphans=1)
    assert [one.name for one in (directory / "staging").iterdir()] == ["fresh"]
    # The folder stays, also without files.
    assert await local.sweeper.sweep(NOW + 2 * DAY) == Swept(orphans=1)
    assert await local.objects.create("keys/a/one", b"x")
