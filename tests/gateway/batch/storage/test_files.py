"""Files of keys: who has them, how long, and how much they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.storage import BrokenObject, Storage, Usage, create_storage
from fleetkeeper_gateway.batch.storage.files import COUNTED_FOR_S, StoredFiles
from fleetkeeper_gateway.batch.storage.records import Records
from tests.support.batch_storage import (
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
    settings,
)


@pytest.mark.promise("batch-isolation")
async def test_a_file_is_found_by_its_key_alone(storage: Storage) -> None:
    record = a_file(filename="größe.jsonl", expires=NOW + DAY)
    await put_file(storage, record)
    assert await storage.files.get(KEY, record.id) == record
    assert await storage.files.get(OTHER_KEY, record.id) is None
    assert await storage.files.list(OTHER_KEY) == []
    assert not await storage.files.delete(OTHER_KEY, record.id)
    assert await storage.objects.read(storage.files.data_path(KEY, record.id)) == b"xxxxx"


async def test_files_are_listed_newest_first(storage: Storage) -> None:
    for number in (2, 9, 1, 5):
        await put_file(storage, a_file(number))
    await put_file(storage, a_file(3, key_id=OTHER_KEY))
    assert [one.id for one in await storage.files.list(KEY)] == [file_id(n) for n in (9, 5, 2, 1)]


async def test_a_file_without_a_record_does_not_exist(storage: Storage) -> None:
    await storage.objects.write(storage.files.data_path(KEY, file_id(1)), parts_of(b"x"))
    assert await storage.files.get(KEY, file_id(1)) is None
    assert await storage.files.list(KEY) == []
    assert not await storage.files.delete(KEY, file_id(1))


async def test_a_deleted_file_leaves_nothing(storage: Storage) -> None:
    await put_file(storage, a_file())
    assert len(await storage.files.list(KEY)) == 1
    assert await storage.files.delete(KEY, file_id(1))
    assert not await storage.files.delete(KEY, file_id(1))
    assert await storage.files.get(KEY, file_id(1)) is None
    assert await storage.files.list(KEY) == []
    assert await paths_in(storage) == []


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


BROKEN = {
    "cut": b'{"id": "file-',
    "empty": b"",
    "no object": b"[]",
    "a text for a number": b'{"id":"%s","key_id":"team-a.ci","filename":"a","purpose":"batch",'
    b'"bytes":"5","created":1,"expires":null}' % file_id(1).encode(),
    "an entry missing": b'{"id":"%s"}' % file_id(1).encode(),
    "of another file": b'{"id":"%s","key_id":"team-a.ci","filename":"a","purpose":"batch",'
    b'"bytes":5,"created":1,"expires":null}' % file_id(2).encode(),
    "of another key": b'{"id":"%s","key_id":"team-b","filename":"a","purpose":"batch",'
    b'"bytes":5,"created":1,"expires":null}' % file_id(1).encode(),
    "with an ID that leads elsewhere": b'{"id":"../x","key_id":"..","filename":"a",'
    b'"purpose":"batch","bytes":5,"created":1,"expires":null}',
    "no UTF-8": b'{"id":"\xff"}',
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


async def test_usage_follows_what_is_stored(storage: Storage) -> None:
    assert await storage.files.usage(KEY) == Usage()
    for number in range(1, 4):
        await put_file(storage, a_file(number, bytes=100 * number))
    await put_file(storage, a_file(9, key_id=OTHER_KEY))
    assert await storage.files.usage(KEY) == Usage(3, 600)
    await storage.files.delete(KEY, file_id(2))
    assert await storage.files.usage(KEY) == Usage(2, 400)
    fresh = StoredFiles(storage.objects, Records(storage.objects), retention_s=DAY)
    assert await fresh.usage(KEY) == Usage(2, 400)


class Lists:
    """Counts the lists of a store, and holds them if wanted."""

    def __init__(self, storage: Storage) -> None:
        self._objects = storage.objects
        self.count = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.began = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    async def list(self, prefix: str) -> object:
        """List, once it may."""
        self.count += 1
        found = await self._objects.list(prefix)
        self.began.set()
        await self.may_end.wait()
        return found


async def test_usage_is_counted_once_a_minute(local: Storage) -> None:
    time = [0.0]
    lists = Lists(local)
    files = StoredFiles(
        lists,  # type: ignore[arg-type]
        Records(local.objects),
        retention_s=DAY,
        wall=lambda: NOW,
        monotonic=lambda: time[0],
    )
    assert await asyncio.gather(*(files.usage(KEY) for _ in range(10))) == [Usage()] * 10
    # Another replica takes a file.
    await put_file(local, a_file())
    assert await files.usage(KEY) == Usage()
    assert lists.count == 1
    time[0] += COUNTED_FOR_S
    assert await files.usage(KEY) == Usage(1, 5)
    assert lists.count == 2


async def test_a_file_that_comes_during_a_count_is_counted_the_next_time(local: Storage) -> None:
    lists = Lists(local)
    files = StoredFiles(
        lists,  # type: ignore[arg-type]
        Records(local.objects),
        retention_s=DAY,
        wall=lambda: NOW,
    )
    lists.may_end.clear()
    counting = asyncio.create_task(files.usage(KEY))
    await asyncio.wait_for(lists.began.wait(), 120)
    await local.objects.write(files.data_path(KEY, file_id(1)), parts_of(b"xxxxx"))
    await files.put(a_file())
    lists.may_end.set()
    await counting
    assert await files.usage(KEY) == Usage(1, 5)


async def test_a_count_that_fails_is_tried_again(local: Storage, directory: Path) -> None:
    await put_file(local, a_file())
    list_ = local.objects.list
    calls = []

    async def failing(prefix: str) -> object:
        calls.append(prefix)
        if len(calls) == 1:
            raise StorageError("down")
        return await list_(prefix)

    local.objects.list = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageError):
        await local.files.usage(KEY)
    assert await local.files.usage(KEY) == Usage(1, 5)


async def test_files_survive_the_process(directory: Path, clock: Clock) -> None:
    url = f"file://{directory}"
    first = create_storage(settings(url), wall=clock)
    await put_file(first, a_file())
    first.close()
    second = create_storage(settings(url), wall=clock)
    assert await second.files.list(KEY) == [a_file()]
    second.close()
