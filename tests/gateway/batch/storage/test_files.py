"""Files of keys: who has them, how long, and how much they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import Object
from fleetkeeper_gateway.batch.model import Usage
from fleetkeeper_gateway.batch.storage import BrokenObject, Storage, files
from fleetkeeper_gateway.batch.storage.files import FILE, StoredFiles
from fleetkeeper_gateway.batch.storage.records import Records
from tests.support.batch.batch_storage import (
    DAY,
    KEY,
    NOW,
    OTHER_KEY,
    Clock,
    a_file,
    file_id,
    parts_of,
    paths_in,
    put_file,
)


@pytest.mark.promise("batch-isolation")
async def test_a_file_is_found_by_its_key_alone(storage: Storage) -> None:
    record = a_file(filename="größe.jsonl", expires=NOW + DAY)
    path = storage.files.data_path(KEY, record.id)
    # Without a record it does not exist.
    await storage.objects.write(path, parts_of(b"xxxxx"))
    assert await storage.files.get(KEY, record.id) is None
    assert not await storage.files.delete(KEY, record.id)
    await storage.files.put(record)
    assert await storage.files.get(KEY, record.id) == record
    assert await storage.files.get(OTHER_KEY, record.id) is None
    assert await storage.files.list(OTHER_KEY) == []
    assert not await storage.files.delete(OTHER_KEY, record.id)
    assert await storage.objects.read(path) == b"xxxxx"
    assert await storage.files.list(KEY) == [record]
    assert await storage.files.delete(KEY, record.id)
    assert not await storage.files.delete(KEY, record.id)
    assert await storage.files.get(KEY, record.id) is None
    assert await storage.files.list(KEY) == []
    assert await paths_in(storage) == []


async def test_files_are_listed_newest_first_and_counted(storage: Storage) -> None:
    assert await storage.files.usage(KEY) == Usage()
    for number in (2, 9, 1, 5):
        await put_file(storage, a_file(number, bytes=100 * number))
    await put_file(storage, a_file(3, key_id=OTHER_KEY))
    assert [one.id for one in await storage.files.list(KEY)] == [file_id(n) for n in (9, 5, 2, 1)]
    assert await storage.files.usage(KEY) == Usage(4, 1700)
    await storage.files.delete(KEY, file_id(2))
    # Bytes of an upload whose record is still to come.
    await storage.objects.write(storage.files.data_path(KEY, file_id(7)), parts_of(b"xxxxx"))
    fresh = StoredFiles(storage.objects, Records(storage.objects), retention_s=DAY)
    assert await storage.files.usage(KEY) == await fresh.usage(KEY) == Usage(3, 1500)


async def test_the_first_record_of_a_file_counts(storage: Storage) -> None:
    """Two finalizers write the same output file."""
    await put_file(storage, a_file(created=NOW))
    await put_file(storage, a_file(created=NOW + 5))
    found = await storage.files.get(KEY, file_id(1))
    assert found is not None
    assert found.created == NOW
    assert await storage.files.usage(KEY) == Usage(1, 5)


@pytest.mark.parametrize(("expires", "lives_s"), [(NOW + 100, 100), (None, 30 * DAY)])
async def test_a_file_that_expired_does_not_exist(
    local: Storage, clock: Clock, expires: int | None, lives_s: int
) -> None:
    await put_file(local, a_file(created=NOW, expires=expires))
    clock.now = NOW + lives_s - 1
    assert await local.files.get(KEY, file_id(1)) is not None
    assert len(await local.files.list(KEY)) == 1
    clock.now += 1
    assert await local.files.get(KEY, file_id(1)) is None
    assert await local.files.list(KEY) == []
    assert not await local.files.delete(KEY, file_id(1))


SOUND = FILE.encode(a_file())
BROKEN = {
    "cut": SOUND[:-1],
    "empty": b"",
    "no object": b"[]",
    "a text for a number": SOUND.replace(b'"bytes":5', b'"bytes":"5"'),
    "an entry missing": SOUND.replace(b'"bytes":5,', b""),
    "of another file": FILE.encode(a_file(2)),
    "of another key": FILE.encode(a_file(key_id=OTHER_KEY)),
    "with an ID that leads elsewhere": FILE.encode(a_file(id="../x", key_id="..")),
    "no UTF-8": SOUND.replace(b"lines", b"\xff"),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
async def test_a_broken_record_is_reported_and_hides_no_other(
    local: Storage, content: bytes
) -> None:
    path = f"keys/{KEY}/files/{file_id(1)}/file.json"
    await local.objects.create(path, content)
    await put_file(local, a_file(2))
    with capture_logs() as logs:
        assert [one.id for one in await local.files.list(KEY)] == [file_id(2)]
    assert [one["path"] for one in logs] == [path]
    with pytest.raises(BrokenObject, match=path):
        await local.files.get(KEY, file_id(1))


async def test_entries_of_a_later_version_are_ignored(local: Storage) -> None:
    """A newer replica may run beside an older one during an upgrade."""
    await put_file(local, a_file())
    path = f"keys/{KEY}/files/{file_id(1)}/file.json"
    content = await local.objects.read(path)
    assert content is not None
    await local.objects.write(path, parts_of(content.replace(b"{", b'{"later":{"a":1},', 1)))
    assert await local.files.get(KEY, file_id(1)) == a_file()


async def test_usage_is_counted_once_a_minute(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[str] = []
    list_all = local.objects.list
    began, may_end = asyncio.Event(), asyncio.Event()

    async def held(prefix: str) -> Sequence[Object]:
        lists.append(prefix)
        found = await list_all(prefix)
        began.set()
        await may_end.wait()
        return found

    monkeypatch.setattr(local.objects, "list", held)
    counts = [asyncio.create_task(local.files.usage(KEY)) for _ in range(10)]
    await began.wait()
    # One that comes during a count is counted the next time.
    await put_file(local, a_file(1))
    may_end.set()
    assert await asyncio.gather(*counts) == [Usage(), *[Usage(1, 5)] * 9]
    # Another replica takes a file.
    await local.objects.write(local.files.data_path(KEY, file_id(2)), parts_of(b"xxxxx"))
    await StoredFiles(local.objects, Records(local.objects), retention_s=DAY).put(a_file(2))
    assert await local.files.usage(KEY) == Usage(1, 5)
    assert len(lists) == 2
    monkeypatch.setattr(files, "COUNTED_FOR_S", 0.0)
    assert await local.files.usage(KEY) == Usage(2, 10)
